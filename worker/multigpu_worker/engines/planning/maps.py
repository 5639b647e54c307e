"""Plans of device maps: one process runs the model, one device after the other, and parts may wait on the host."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from multigpu_worker.engines.planning.costs import Costs
from multigpu_worker.engines.planning.custom_map import MapError, read_map
from multigpu_worker.engines.planning.placement import NoRoomError, divide, fewest
from multigpu_worker.engines.planning.structure import Part, Structure, divided_counts
from multigpu_worker.engines.planning.wish import CPU, DISK, DevicePlan, PlanError, Wish, gib

DEVICES_MAX = 1024
# What a step waits for parts that are not on a GPU: PCIe 4.0 x16, and a fast NVMe disk.
HOST_BYTES_PER_S, DISK_BYTES_PER_S = 25e9, 3e9


def plan_map(structure: Structure, costs: Costs, devices: list[DevicePlan], wish: Wish) -> dict[str, Any]:
    """The map, and what follows from it. Fills in the devices. Raises PlanError."""
    own = structure.own
    sizes = [part.weights_bytes + part.layer * costs.layer_cache_bytes for part in own]
    rooms = [device.left_bytes for device in devices]
    smallest = fewest(sizes, max(rooms), DEVICES_MAX)
    if wish.device_map is not None:
        try:
            named = read_map(structure.parts, wish.device_map, [device.name for device in devices])
        except MapError as error:
            raise PlanError(str(error)) from error
    else:
        named = _placed(own, sizes, rooms, costs, wish, smallest)
    for part in structure.parts:
        if part.tied:
            named.setdefault(part.name, named[part.tied])
    host_bytes = disk_bytes = 0
    for part, size in zip(own, sizes, strict=True):
        place = named[part.name]
        device = devices[0 if isinstance(place, str) else place]
        device.cache_bytes += size - part.weights_bytes
        if place == CPU:
            host_bytes += part.weights_bytes
        elif place == DISK:
            disk_bytes += part.weights_bytes
        else:
            device.weights_bytes += part.weights_bytes
            device.modules.append(part.name)
    _check_limits(devices, wish, host_bytes, disk_bytes)
    for device in devices:
        if not device.modules and not device.cache_bytes:
            device.activation_bytes = device.process_bytes = 0
    return {
        "device_map": {part.name: named[part.name] for part in structure.parts},
        "host_bytes": host_bytes,
        "disk_bytes": disk_bytes,
        "fewest_devices": smallest,
        "notes": _notes(structure, named, costs, host_bytes, disk_bytes, devices),
    }


def _placed(
    own: list[Part], sizes: list[int], rooms: list[int], costs: Costs, wish: Wish, smallest: int | None
) -> dict[str, int | str]:
    """The place of each part. Raises PlanError."""
    try:
        placed: list[int | str] = list(divide(sizes, rooms, wish.strategy))
    except NoRoomError:
        if not wish.host_bytes and not wish.disk_bytes:
            raise PlanError(_does_not_fit(own, sizes, rooms, wish, smallest)) from None
        placed = _offloaded(own, rooms, costs, wish)
    return {part.name: place for part, place in zip(own, placed, strict=True)}


def _offloaded(own: list[Part], rooms: list[int], costs: Costs, wish: Wish) -> list[int | str]:
    """Fills the devices; a part for which they have no room is on the host, or on the disk. The first device runs
    these: it keeps room for the largest, which is copied there for each step, and for the cache of all. Raises
    PlanError.
    """
    kept_bytes = 0
    while True:
        placed = _spill(own, [rooms[0] - kept_bytes, *rooms[1:]], costs, wish)
        waiting = [part for part, place in zip(own, placed, strict=True) if place in (CPU, DISK)]
        needed_bytes = max((part.weights_bytes for part in waiting), default=0)
        needed_bytes += sum(part.layer for part in waiting) * costs.layer_cache_bytes
        if needed_bytes <= kept_bytes:
            return placed
        if needed_bytes > rooms[0]:
            raise PlanError(f"the first device needs room for {gib(needed_bytes)}, to run what is on the host, and has "
                            f"{gib(max(0, rooms[0]))}: leave room for fewer tokens, or give it more")  # fmt: skip
        kept_bytes = needed_bytes


def _spill(own: list[Part], rooms: list[int], costs: Costs, wish: Wish) -> list[int | str]:
    left = {CPU: wish.host_bytes, DISK: wish.disk_bytes}
    placed: list[int | str] = []
    device, rooms = 0, list(rooms)
    for part in own:
        size = part.weights_bytes + part.layer * costs.layer_cache_bytes
        place: int | str | None = next((each for each in range(device, len(rooms)) if size <= rooms[each]), None)
        if isinstance(place, int):
            rooms[place] -= size
            device = place
        else:
            place = next((each for each in left if part.weights_bytes <= left[each]), None)
            if place is None:
                raise PlanError(
                    f"{part.name} fits neither on a device nor within the limits of cpu and disk: raise them"
                )
            left[place] -= part.weights_bytes
        placed.append(place)
    return placed


def _does_not_fit(own: list[Part], sizes: list[int], rooms: list[int], wish: Wish, smallest: int | None) -> str:
    if max(rooms) <= 0:
        limit_bytes = max(limit for _, limit in wish.devices)
        return (
            f"a process and the intermediate results of a step take {gib(limit_bytes - max(rooms))} on each device, "
            f"and the largest limit is {gib(limit_bytes)}: raise max_memory, or use larger devices"
        )
    places = f"{len(rooms)} device(s) have" if wish.devices[0][0] != CPU else "the host has"
    what = f"the model takes {gib(sum(sizes))} with its cache, and {places} room for {gib(sum(rooms))}"
    if max(part.weights_bytes for part in own) > max(rooms):
        return f"{what}; its largest part takes {gib(max(sizes))}: only tensor parallelism divides it"
    if max(sizes) > max(rooms):
        return f"{what}: leave room for fewer tokens (--cache-tokens)"
    if wish.devices[0][0] == CPU:
        return f"{what}: let part of it be on the disk (max_memory of disk), or leave room for fewer tokens"
    more = f"{smallest} such devices would do" if smallest else f"more than {DEVICES_MAX} such devices are needed"
    return f"{what}: {more}; or let part of it be on the host (max_memory of cpu), or leave room for fewer tokens"


def _check_limits(devices: list[DevicePlan], wish: Wish, host_bytes: int, disk_bytes: int) -> None:
    """For maps that were given. Raises PlanError."""
    for index, device in enumerate(devices):
        if (device.modules or device.cache_bytes) and device.left_bytes < 0:
            taken = device.limit_bytes - device.left_bytes
            raise PlanError(f"device {index} ({device.name}) would have {gib(taken)} of {gib(device.limit_bytes)}")
    for name, size, limit in ((CPU, host_bytes, wish.host_bytes), (DISK, disk_bytes, wish.disk_bytes)):
        if size > limit:
            raise PlanError(f"{name} would have {gib(size)} of {gib(limit)}: set max_memory of {name}")


def _notes(
    structure: Structure, named: Mapping[str, int | str], costs: Costs, host_bytes: int, disk_bytes: int,
    devices: list[DevicePlan],
) -> list[str]:  # fmt: skip
    # The first device runs what is on the host.
    places = [0 if isinstance(place := named[part.name], str) else place for part in structure.parts]
    crossings = sum(a != b for a, b in pairwise(places))
    used = sum(bool(device.modules) for device in devices)
    notes = []
    if not costs.activation_bytes:
        notes.append(f"intermediate results of {structure.architecture} are not estimated")
    if used > 1:
        notes.append(f"{used} devices work one after the other, each idle meanwhile")
        if structure.tensor_plan and not any(count % used for count in divided_counts(structure).values()):
            notes[-1] += f": --tensor-parallel {used} uses all at once"
    if crossings:
        notes.append(f"each token crosses between devices {crossings} time(s), with {costs.hidden_bytes:,} bytes")
    notes += [
        f"{part.name} uses the weights of {part.tied}, and is where they are" for part in structure.parts if part.tied
    ]
    for what, size, speed in (("host", host_bytes, HOST_BYTES_PER_S), ("disk", disk_bytes, DISK_BYTES_PER_S)):
        if size:
            notes.append(
                f"slow: {gib(size)} are on the {what}, and are copied to a device for each step: "
                f"{size / speed:.2g} s at {speed / 1e9:g} GB/s"
            )
    return notes
