"""Checks a device map that someone wrote: every part of the model is placed once, on a device that is there."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from multigpu_worker.engines.planning.structure import Part
from multigpu_worker.engines.planning.wish import CPU, DISK

PLACES = (CPU, DISK)


class MapError(ValueError):
    """The map is wrong. The message names the entry, and what would be right."""


def read_map(parts: Sequence[Part], given: Mapping[str, Any], devices: Sequence[str]) -> dict[str, int | str]:
    """The place of each part: the index of a device, "cpu" or "disk". A key is a part, or a module with several parts;
    "" is the whole model. Raises MapError.
    """
    places = {key: _place(key, value, devices) for key, value in given.items()}
    names = [part.name for part in parts]
    for key in places:
        if key and key not in names and not any(name.startswith(f"{key}.") for name in names):
            raise MapError(_unknown(key, names))
    found: dict[str, int | str] = {}
    for part in parts:
        keys = [key for key in places if not key or part.name == key or part.name.startswith(f"{key}.")]
        if len(keys) > 1:
            raise MapError(f"the device map places {part.name} twice: by {' and '.join(map(repr, sorted(keys)))}")
        if keys:
            found[part.name] = places[keys[0]]
        elif not part.tied:
            raise MapError(f"the device map does not place {part.name}")
    for part in parts:
        if part.tied and found.get(part.name, found[part.tied]) != found[part.tied]:
            raise MapError(f"{part.name} uses the weights of {part.tied}: place both on the same device")
    return found


def _place(key: str, value: Any, devices: Sequence[str]) -> int | str:
    if value in devices:  # "cpu", too, if that is the device
        return devices.index(value)
    if value in PLACES:
        return str(value)
    if type(value) is int and 0 <= value < len(devices):
        return value
    there = ", ".join([*(f"{index} ({name})" for index, name in enumerate(devices)), *PLACES])
    raise MapError(f"the device map places {key!r} on {value!r}; there are {there}")


def _unknown(key: str, names: Sequence[str]) -> str:
    inside = next((name for name in names if key.startswith(f"{name}.")), None)
    if inside is not None:
        return f"the device map places {key}, which is within {inside}: that stays whole"
    near = difflib.get_close_matches(key, names, n=1)
    hint = f", did you mean {near[0]!r}?" if near else f"; the first is {names[0]!r}" if names else ""
    return f"the device map places {key!r}, which is no module of the model{hint}"
