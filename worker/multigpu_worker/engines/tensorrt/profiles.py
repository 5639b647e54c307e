"""Optimisation profiles: the shapes that a plan takes, and those that it is tuned for. Pure.

A batch has rows (texts, examples) and a width (tokens of the longest text). A plan takes every shape within its
profiles and is tuned for one shape in each. The widths are divided at 1/16 and 1/4 of the largest, each range a
profile, so together the profiles cover every shape within the limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PROFILES_MAX = 3
WIDTH_RATIO = 4
# Kernels prefer multiples of this width.
WIDTH_STEP = 8
WIDTH_FIRST_MIN = 16

# The least and the largest shape of an input.
ShapeRange = tuple[tuple[int, ...], tuple[int, ...]]
# For "rows" and "width": the least size, the one to tune for, the largest.
Profile = dict[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest shapes: rows * width is at most `tokens_max`, except for single rows."""

    rows_max: int
    width_max: int
    tokens_max: int

    def rows_at(self, width: int) -> int:
        """The most rows of that width."""
        return max(1, min(self.rows_max, self.tokens_max // width))


def profiles_for(limits: Limits) -> list[Profile]:
    """Profiles that cover all shapes within the limits."""
    widths = [limits.width_max]
    while len(widths) < PROFILES_MAX and widths[0] // WIDTH_RATIO >= WIDTH_FIRST_MIN:
        widths.insert(0, min(-(-(widths[0] // WIDTH_RATIO) // WIDTH_STEP) * WIDTH_STEP, limits.width_max))
    profiles: list[Profile] = []
    least = 1
    for most in widths:
        profiles.append({"rows": (1, limits.rows_at(most), limits.rows_at(least)), "width": (least, most, most)})
        least = most + 1
    return profiles


def choose(profiles: Sequence[Mapping[str, ShapeRange]], shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The index of the first profile that takes inputs of these shapes. None: none does."""
    for index, ranges in enumerate(profiles):
        if all(_takes(ranges[name], shape) for name, shape in shapes.items()):
            return index
    return None


def _takes(shape_range: ShapeRange, shape: tuple[int, ...]) -> bool:
    least, most = shape_range
    return len(shape) == len(least) and all(
        low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
    )
