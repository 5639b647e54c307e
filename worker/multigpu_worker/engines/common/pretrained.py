"""Loading with transformers: offline, without code from the model folder, and with every weight accounted for.

Import transformers from here: the model hub has to be switched off before the first import.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Weights that do not fit are an error below; transformers only warns about them.
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import transformers

from multigpu_worker.engines.common.torch_runtime import memory_errors
from multigpu_worker.repository.folders import ModelFolderError

__all__ = ["LOCAL", "load_weights", "loading", "transformers"]

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_weights(kind: Any, folder: Path, *, pickled: bool = False, unused: str = "\0", **options: Any) -> Any:
    """Return `kind.from_pretrained(folder)`. Raises ModelFolderError if weights are missing or of another shape.

    `pickled`: weights may be a pickle, of which transformers loads tensors only. `unused`: prefix of weights that the
    caller never reads, so they may be missing.
    """
    model, report = kind.from_pretrained(
        folder,
        # None: safetensors if there are any.
        use_safetensors=None if pickled else True,
        output_loading_info=True,
        **LOCAL,
        **options,
    )
    # transformers initialises such weights with random numbers and continues.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(unused))
    if wrong := [str(key) for key in [*missing, *report["mismatched_keys"]]]:
        names = ", ".join(wrong[:3])
        raise ModelFolderError(
            f"{folder} has weights that don't fit its config.json ({names} …): copy the model folder again"
        )
    return model


@contextlib.contextmanager
def loading(folder: Path, loader: str) -> Iterator[None]:
    """Raise a library's errors as ModelFolderError, and torch's out-of-memory errors as MemoryError.

    `loader`: the class of transformers to try the folder with by hand.
    """
    try:
        with memory_errors():
            yield
    except (ModelFolderError, MemoryError, ImportError):
        raise
    except Exception as error:
        raise ModelFolderError(
            f"{folder} can't be loaded: {type(error).__name__}: {error}. Try it with transformers.{loader}."
            "from_pretrained, and copy the model folder again if that fails too"
        ) from error
