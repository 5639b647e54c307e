"""The confidence interval of a ratio that was measured over blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95
# Fewer blocks say too little of how they vary.
BLOCKS_MIN = 5


@dataclass(frozen=True, slots=True)
class Interval:
    mean: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Half of the width, as a fraction of the mean."""
        return (self.high - self.low) / 2 / abs(self.mean) if self.mean else float("inf")


def ratio(amounts: Sequence[float], counts: Sequence[float]) -> Interval | None:
    """The amount for each of what is counted, over blocks, with the bootstrap's interval of 95 %. None: there are too
    few blocks, or nothing was counted.
    """
    if len(amounts) < BLOCKS_MIN or not sum(counts):
        return None
    above, below = np.asarray(amounts, dtype=float), np.asarray(counts, dtype=float)
    chosen = np.random.default_rng(0).integers(0, len(above), (RESAMPLES, len(above)))
    sums = below[chosen].sum(axis=1)
    ratios = above[chosen].sum(axis=1)[sums > 0] / sums[sums > 0]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Interval(float(above.sum() / below.sum()), float(low), float(high))
