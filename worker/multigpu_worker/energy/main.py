"""What `mgpuctl energy` asks of this host's devices, in a process of its own: a broken driver may hang its caller.

    python -m multigpu_worker.energy.main check CONFIG.yaml | info [DEVICE_ID]... | recommend

The answer is a line of JSON. Without one, stderr says why; the exit code is 2 if the configuration is wrong, else 1.
"""

import json
import sys
from pathlib import Path
from typing import Any

from multigpu.errors import ConfigError

from multigpu_worker.device.interface import DeviceError
from multigpu_worker.energy import availability
from multigpu_worker.energy.config import load


def answer(command: str, *arguments: str) -> dict[str, Any]:
    """The answer to a command. Raises ConfigError or DeviceError."""
    if command == "check":
        return availability.check(load(Path(*arguments)))
    if command == "info":
        return availability.report([int(each) for each in arguments] or availability.all_gpus(), {})
    assert command == "recommend", command
    return availability.recommended()


def main() -> None:
    try:
        print(json.dumps(answer(*sys.argv[1:])))  # noqa: T201  for the parent process
    except (ConfigError, DeviceError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
