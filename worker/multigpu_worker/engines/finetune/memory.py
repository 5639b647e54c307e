"""The memory that training takes, as measured, and the strategy that follows from it."""

import os
import resource
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from multigpu_worker.engines.common.torch_runtime import memory_errors

GIB = 1 << 30
# Adam's two moments, in float32.
ADAM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Need:
    """Of a rank. `peak_bytes`: None, if a pass ran out of memory."""

    peak_bytes: int | None
    usable_bytes: int


def device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_memory(devices: Sequence[torch.device], fraction: float) -> None:
    """Lets this process take no more than its share of each device: what needs more runs out of memory."""
    if devices[0].type == "cuda":
        for device in devices:
            torch.cuda.set_per_process_memory_fraction(fraction, device)
    else:
        limit = int(device_bytes(devices[0]) * fraction)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def begin_peak(device: torch.device) -> None:
    """The peak is counted from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process had: of the device's allocator, or resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def measure(model: Any, batch: dict[str, torch.Tensor], device: torch.device, ranks: int, fraction: float) -> Need:
    """One pass forward and back. `ranks`: how many ranks share this device."""
    usable = int(device_bytes(device) * fraction / ranks)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    try:
        with memory_errors():
            begin_peak(device)
            model.to(device).train()
            model(**{name: each.to(device) for name, each in batch.items()}).loss.backward()
            peak = peak_bytes(device)
    except MemoryError:
        return Need(None, usable)
    finally:
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            model.to("cpu")
            torch.cuda.empty_cache()
    return Need(peak + trained * ADAM_BYTES, usable)


def ranks_beside(device: torch.device, gather: Any) -> int:
    """How many ranks share this rank's device. `gather`: a list of what all ranks have."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    here = f"{socket.gethostname()} {uuid}"
    return Counter(gather([here]))[here]


def choose(needs: list[Need]) -> tuple[str, str]:
    """The strategy of a job with these ranks, and why."""
    if any(need.peak_bytes is None for need in needs):
        return "fsdp2", "a pass of the whole model ran out of a rank's memory"
    need = max(needs, key=lambda each: (each.peak_bytes or 0) / each.usable_bytes)
    assert need.peak_bytes is not None
    measured = (
        f"a rank takes {need.peak_bytes / GIB:.1f} GiB, as measured in a pass, with Adam's state, of the "
        f"{need.usable_bytes / GIB:.1f} GiB that it may"
    )
    return ("ddp" if need.peak_bytes <= need.usable_bytes else "fsdp2"), measured
