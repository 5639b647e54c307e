"""Work that is done in a process of its own: exporting, quantising, building.

It needs libraries that the engine must not hold (torch in a process that serves without it), it can crash where the
engine must live, and what it took of memory is given back for certain when it ends. The function is named, its
arguments and its answer are JSON. The process dies with the engine that started it.
"""

import contextlib
import ctypes
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

from multigpu_worker.models.folders import ModelFolderError

_PR_SET_PDEATHSIG = 1
# Of what a process that died wrote on its standard error, the end is kept for the message.
STDERR_CHARACTERS_MAX = 1_000

log = structlog.get_logger(__name__)


def run_apart(
    function: str, arguments: Mapping[str, Any], *, threads: int = 0, niceness: int = 0, gpu: bool = False
) -> Any:
    """What "module:function" answers to `arguments`, called in a process of its own. It sees no GPU unless `gpu`.

    Raises ModelFolderError with the function's words where it raised, MemoryError where memory ran out, OSError where
    the system rejected something, such as room on the disk.
    """
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    if not gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    if threads:
        environment |= {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    log.info("working in a process of its own", function=function)
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
    if not text:
        raise ModelFolderError(
            f"{function} died with exit status {done.returncode} (negative: a signal; -9 is often a lack of memory): "
            f"{tail}"
        )
    outcome = json.loads(text)
    if "value" in outcome:
        return outcome["value"]
    if outcome["error"] == "MemoryError":
        raise MemoryError(outcome["message"])
    if outcome.get("errno"):
        raise OSError(outcome["errno"], outcome["message"])
    raise ModelFolderError(outcome["message"])


def main() -> None:
    """The other end of `run_apart`."""
    parent_pid, answer_fd, niceness, function, arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent_pid):  # it died before we asked
        os._exit(0)
    os.nice(int(niceness))
    module, _, name = function.partition(":")
    try:
        outcome = {"value": getattr(importlib.import_module(module), name)(**json.loads(arguments))}
    except MemoryError as error:
        outcome = {"error": "MemoryError", "message": str(error)}
    except ModelFolderError as error:
        outcome = {"error": "ModelFolderError", "message": str(error)}
    except ImportError as error:
        outcome = {"error": "ImportError", "message": f"{error}: install what is missing (docs/dependencies.md)"}
    except OSError as error:
        outcome = {"error": "OSError", "message": f"{function}: {error}", "errno": error.errno}
    except Exception as error:  # noqa: BLE001  (of any library)
        outcome = {"error": type(error).__name__, "message": f"{function}: {type(error).__name__}: {error}"}
    with contextlib.suppress(BrokenPipeError), os.fdopen(int(answer_fd), "w") as file:
        json.dump(outcome, file)


if __name__ == "__main__":
    main()
