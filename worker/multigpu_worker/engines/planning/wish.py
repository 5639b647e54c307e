"""What a plan is made for, and what it says of each device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CPU, DISK = "cpu", "disk"
# Of a device whose limit is not given; the rest is for fragmentation.
USABLE_SHARE = 0.95


class PlanError(Exception):
    """The model does not fit, or can't be divided so. The message says what would do."""


@dataclass(slots=True, kw_only=True)
class DevicePlan:
    """What is on one device. All in bytes; `limit_bytes` is for the sum of all but `left_bytes`."""

    name: str
    limit_bytes: int
    weights_bytes: int = 0
    cache_bytes: int = 0
    activation_bytes: int = 0
    process_bytes: int = 0
    modules: list[str] = field(default_factory=list)

    @property
    def left_bytes(self) -> int:
        taken = self.weights_bytes + self.cache_bytes + self.activation_bytes + self.process_bytes
        return self.limit_bytes - taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How to divide. `devices`: names and limits in bytes. `cache_tokens` None: one sequence of the longest context."""

    devices: Sequence[tuple[str, int]]
    strategy: str = "auto"
    host_bytes: int = 0  # for parts that fit no device; 0: none
    disk_bytes: int = 0
    tensor_parallel: int = 1
    pipeline: int = 1
    cache_tokens: int | None = None
    device_map: Mapping[str, Any] | None = None


def gib(size_bytes: float) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"
