"""What to change in the next run, each with the measurement that says so."""

from collections.abc import Mapping
from typing import Any

# A share of the time in evaluations and checkpoints, above which they are too many; of memory, below which there is
# room; of padding, above which it is a loss.
PAUSES_MAX, MEMORY_LOW, PADDING_MAX = 0.25, 0.45, 0.4


def advice(found: Mapping[str, Any]) -> list[str]:
    """`found`: the result of the script."""
    said = []
    micro, passes = found["micro_batch"], found["accumulation"]
    if passes > found["accumulation_asked"]:
        said.append(f"accumulation {passes}: {found['accumulation_asked']} ran out of memory and cost a start")
    elif passes > 1 and found["memory_peak"] < MEMORY_LOW:
        said.append(f"accumulation {passes // 2}: passes of {micro} took {found['memory_peak']:.0%} of the memory")
    losses = found["evaluations"]
    if not losses:
        said.append("more texts: none were held out, so nothing says whether the model is better")
    elif min(losses, key=lambda each: each[1])[0] == losses[0][0]:
        said.append("a lower learning_rate: no evaluation was better than that of the model before")
    elif len(losses) > 2:
        best, last = min(losses, key=lambda each: each[1])[0], losses[-1][0]
        if best == last:
            said.append(f"more epochs: the loss of the evaluations still fell at the last step, {last}")
        elif best < losses[-2][0]:
            said.append(f"fewer steps: the loss of the evaluations was lowest at step {best} of {last}, which was kept")
    if found["pauses"] > PAUSES_MAX:
        what = "evaluations and checkpoints" if losses else "checkpoints"
        said.append(f"a larger every: {what} took {found['pauses']:.0%} of the time")
    if found["padding"] > PADDING_MAX:
        said.append(f"texts of like lengths, or joined: {found['padding']:.0%} of what was computed was padding")
    return said
