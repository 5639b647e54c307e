"""Optimisation profiles: for which shapes a plan is made fast, from the shapes that were seen. Pure.

A batch has rows (texts, examples) and a width (tokens in the longest text). A plan takes every shape within its
profiles' ranges, and is tuned for one shape in each. So the widths are cut into a few ranges, each a profile: before
anything is known, by powers of four up to the longest text; later, so that each has an equal share of the padded
tokens that were seen, and is tuned for the shapes that most of its tokens came in. Whatever was seen, the profiles
together cover every shape that may ever come.

Each plan takes minutes of work. A new one is worth it when the mix has moved far from what the last was made for, and
each has to be asked for by twice as many batches as the one before: so there are few, however the load goes round.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

PROFILES_MAX = 3
# Widths are rounded up to this; kernels like it.
WIDTH_STEP = 8
WIDTH_RATIO = 4
WIDTH_FIRST_MIN = 16
# Batches before the first opinion.
BATCHES_MIN = 2_000
# Share of the padded tokens that must have moved to other shapes, by their powers of two.
MOVED_SHARE = 0.3

# The least and the largest shape of an input.
ShapeRange = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Of a dimension: the least, the one to be tuned for, the most."""

    least: int
    best: int
    most: int

    def __post_init__(self) -> None:
        assert 1 <= self.least <= self.best <= self.most, self

    def plain(self) -> list[int]:
        return [self.least, self.best, self.most]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    rows: Range
    width: Range

    def plain(self) -> dict[str, list[int]]:
        """As plain values, such as JSON takes."""
        return {"rows": self.rows.plain(), "width": self.width.plain()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The shapes that may come: rows * width is at most `tokens_max`, but for single rows."""

    rows_max: int
    width_max: int
    tokens_max: int

    def rows_at(self, width: int) -> int:
        """Most rows of that width."""
        return max(1, min(self.rows_max, self.tokens_max // width))


@dataclass(slots=True)
class ShapeHistogram:
    """How many batches came in each shape."""

    counts: Counter[tuple[int, int]] = field(default_factory=Counter)
    batches: int = 0

    def add(self, rows: int, width: int) -> None:
        """Count a batch. Shapes are rounded, so that there are few."""
        self.counts[_round_rows(rows), -(-width // WIDTH_STEP) * WIDTH_STEP] += 1
        self.batches += 1

    def shares(self) -> dict[tuple[int, int], float]:
        """Which share of the padded tokens came in which shape, by powers of two."""
        total = sum(rows * width * n for (rows, width), n in self.counts.items())
        shares: Counter[tuple[int, int]] = Counter()
        for (rows, width), n in self.counts.items():
            shares[rows.bit_length(), width.bit_length()] += rows * width * n
        return {shape: tokens / total for shape, tokens in shares.items()}

    def moved_from(self, other: "ShapeHistogram") -> float:
        """The share of tokens that would have to change their shape to turn the other's mix into this one. 0 to 1."""
        ours, theirs = self.shares(), other.shares()
        return sum(max(0.0, share - theirs.get(shape, 0.0)) for shape, share in ours.items())


def first_profiles(limits: Limits) -> tuple[Profile, ...]:
    """Before anything was seen."""
    ends = [limits.width_max]
    while len(ends) < PROFILES_MAX and ends[0] // WIDTH_RATIO >= WIDTH_FIRST_MIN:
        ends.insert(0, _step(ends[0] // WIDTH_RATIO, limits))
    return tuple(_profile(limits, low, high, high, limits.rows_at(high)) for low, high in _spans(ends))


def profiles_for(seen: ShapeHistogram, limits: Limits) -> tuple[Profile, ...]:
    """For the shapes that were seen."""
    assert seen.batches > 0
    by_width: Counter[int] = Counter()
    for (rows, width), n in seen.counts.items():
        by_width[min(width, limits.width_max)] += rows * width * n
    thirds = [_quantile(by_width, part / PROFILES_MAX) for part in range(1, PROFILES_MAX)]
    ends = sorted({*(_step(width, limits) for width in thirds), limits.width_max})
    profiles = []
    for low, high in _spans(ends):
        inside = {shape: n for shape, n in seen.counts.items() if low <= min(shape[1], limits.width_max) <= high}
        widths, heights = Counter[int](), Counter[int]()
        for (rows, width), n in inside.items():
            widths[width] += rows * width * n
            heights[rows] += rows * width * n
        width = _quantile(widths, 0.5) if inside else high
        rows = _quantile(heights, 0.5) if inside else limits.rows_at(high)
        profiles.append(_profile(limits, low, width, high, rows))
    return tuple(profiles)


@dataclass(slots=True, kw_only=True)
class Watch:
    """Decides when the profiles of a plan no longer fit what comes."""

    limits: Limits
    profiles: tuple[Profile, ...]
    # What the profiles were made from. None: nothing.
    base: ShapeHistogram | None = None
    seen: ShapeHistogram = field(default_factory=ShapeHistogram)
    # Batches before the next opinion.
    patience: int = BATCHES_MIN

    @classmethod
    def begin(cls, limits: Limits) -> "Watch":
        return cls(limits=limits, profiles=first_profiles(limits))

    def add(self, rows: int, width: int) -> tuple[Profile, ...] | None:
        """Count a batch. The answer is profiles that are worth a new plan; None: there are none, which is the rule."""
        self.seen.add(rows, width)
        if self.seen.batches < self.patience:
            return None
        seen, self.seen = self.seen, ShapeHistogram()
        if self.base is not None and seen.moved_from(self.base) < MOVED_SHARE:
            return None
        profiles = profiles_for(seen, self.limits)
        self.base = seen
        self.patience *= 2
        if profiles == self.profiles:
            return None
        self.profiles = profiles
        return profiles


def choose(profiles: Sequence[Mapping[str, ShapeRange]], shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The index of the first profile of a plan that takes these inputs. None: none does."""
    for index, ranges in enumerate(profiles):
        if all(_takes(ranges[name], shape) for name, shape in shapes.items()):
            return index
    return None


def _takes(shape_range: ShapeRange, shape: tuple[int, ...]) -> bool:
    least, most = shape_range
    return len(shape) == len(least) and all(
        low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
    )


def _spans(ends: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of widths, without gaps, that end where they are told."""
    low = 1
    for high in ends:
        yield low, high
        low = high + 1


def _profile(limits: Limits, low: int, width: int, high: int, rows: int) -> Profile:
    most = limits.rows_at(low)
    return Profile(
        rows=Range(least=1, best=min(max(rows, 1), most), most=most),
        width=Range(least=low, best=min(max(width, low), high), most=high),
    )


def _step(width: int, limits: Limits) -> int:
    return min(-(-width // WIDTH_STEP) * WIDTH_STEP, limits.width_max)


def _round_rows(rows: int) -> int:
    """Up to three bits: 1 to 8, 10, 12, 14, 16, 20 …"""
    unit = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // unit) * unit


def _quantile(weights: Counter[int], part: float) -> int:
    """The least value at or below which such a part of the weight lies."""
    total, so_far = sum(weights.values()), 0
    for value in sorted(weights):
        so_far += weights[value]
        if so_far >= part * total:
            return value
    raise AssertionError("no weights")
