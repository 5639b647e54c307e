"""Calls a function in a subprocess: exporting, quantising, building.

Why a subprocess: they need libraries that the engine process must not load (torch in a process that serves without it),
they may crash, and all their memory is freed at the end. Arguments and result are JSON. The subprocess dies with its
parent.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import structlog

from multigpu_worker.process_group import die_with_parent
from multigpu_worker.repository.folders import ModelFolderError

# How much of the end of a dead subprocess's standard error goes into the message.
STDERR_CHARACTERS_MAX = 1_000

log = structlog.get_logger(__name__)


class SubprocessDiedError(ModelFolderError):
    """The subprocess ended without an answer. `crashed`: by a signal that neither an operator nor the kernel short of
    memory sends.
    """

    def __init__(self, message: str, *, crashed: bool) -> None:
        super().__init__(message)
        self.crashed = crashed


def subprocess_call(
    function: str, arguments: Mapping[str, Any], *, threads: int = 0, niceness: int = 0, gpu: bool = False
) -> Any:
    """Call "module:function" with keyword arguments in a subprocess, without GPUs unless `gpu`, and return the result.

    Raises ModelFolderError with the function's message if it raised, SubprocessDiedError if the subprocess gave no
    answer, MemoryError if memory ran out, OSError if the system rejected something, such as writing to a full disk.
    """
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    if not gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    if threads:
        environment |= {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    log.info("calling a function in a subprocess", function=function)
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as answer:
        command = [sys.executable, "-m", __name__, str(os.getpid()), str(answer.fileno()), str(niceness)]
        done = subprocess.run(
            [*command, function, json.dumps(dict(arguments))],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=environment,
            pass_fds=(answer.fileno(),),
        )
        answer.seek(0)
        text = answer.read()
        errors.seek(0)
        tail = errors.read()[-STDERR_CHARACTERS_MAX:].strip()
    try:
        outcome = json.loads(text)
    except ValueError:  # empty, or cut off by a full disk
        raise SubprocessDiedError(
            f"{function} died with exit status {done.returncode} (negative: a signal; -9 is often a lack of memory): "
            f"{tail}",
            crashed=done.returncode < 0 and done.returncode not in (-signal.SIGKILL, -signal.SIGTERM),
        ) from None
    if "value" in outcome:
        return outcome["value"]
    if outcome["error"] == "MemoryError":
        raise MemoryError(outcome["message"])
    if outcome.get("errno"):
        raise OSError(outcome["errno"], outcome["message"])
    raise ModelFolderError(outcome["message"])


def main() -> None:
    """Run in the subprocess: call the function and write its outcome to the parent's file."""
    parent_pid, answer_fd, niceness, function, arguments = sys.argv[1:]
    die_with_parent(int(parent_pid))
    os.nice(int(niceness))
    module, _, name = function.partition(":")
    try:
        outcome = {"value": getattr(importlib.import_module(module), name)(**json.loads(arguments))}
    except (MemoryError, ModelFolderError) as error:
        outcome = {"error": "MemoryError" if isinstance(error, MemoryError) else "", "message": str(error)}
    except ImportError as error:
        outcome = {"error": "ImportError", "message": f"{error}: install what is missing (docs/dependencies.md)"}
    except OSError as error:
        outcome = {"error": "OSError", "message": f"{function}: {error}", "errno": error.errno}
    except Exception as error:  # noqa: BLE001  (any library's)
        outcome = {"error": type(error).__name__, "message": f"{function}: {type(error).__name__}: {error}"}
    with contextlib.suppress(BrokenPipeError), os.fdopen(int(answer_fd), "w") as file:
        json.dump(outcome, file)


if __name__ == "__main__":
    main()
