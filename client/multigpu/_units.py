"""Formats sizes, energy and durations for people, in mgpuctl and on the dashboard."""

import itertools

_UNITS_OF_TIME = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def format_size(count: float) -> str:
    """Formats bytes: "512 B", "1.5 MiB"."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1023.5:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.1f} {unit}" if unit != "B" and amount < 99.95 else f"{amount:.0f} {unit}"


def format_energy(joules: float) -> str:
    """Formats joules: "80 µJ", "12 mJ", "3.4 J", "12 Wh", "1.5 kWh". Less than idle power is negative."""
    if joules < 0:
        return f"-{format_energy(-joules)}"
    if joules == 0:
        return "0 J"
    # Limits are those of the rounded amounts: 3,599.9 J is 1 Wh, not 3,600 J.
    for limit, factor, unit in (
        (0.9995e-3, 1e6, "µJ"), (0.9995, 1e3, "mJ"), (3599.5, 1.0, "J"), (3.5982e6, 1 / 3600, "Wh"),
    ):  # fmt: skip
        if joules < limit:
            return f"{_three_digits(joules * factor)} {unit}"
    return f"{_three_digits(joules / 3.6e6)} kWh"


def format_duration(seconds: float) -> str:
    """Formats seconds: "62 µs", "3.5 ms", "2.5 s", "42 s", "3 min 5 s", "2 h 10 min", "4 d"."""
    if seconds <= 0:
        return "0 s"
    for limit, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (9.95, 1.0, "s")):
        if seconds < limit:
            return f"{seconds * factor:.2g} {unit}" if seconds * factor < 99.5 else f"{seconds * factor:.0f} {unit}"
    whole = round(seconds)
    for (large, name), (small, small_name) in itertools.pairwise(_UNITS_OF_TIME):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {name} {rest} {small_name}" if rest else f"{whole // large} {name}"
    return f"{whole} s"


def _three_digits(amount: float) -> str:
    return f"{amount:.3g}" if amount < 999.5 else f"{amount:,.0f}"
