"""Runs as a rank of a job: `python -m multigpu_worker.engines.finetune SETTINGS.json`."""

import os
import sys
import warnings
from pathlib import Path

from multigpu._kinds.finetuning import TextsError

from multigpu_worker.engines.common.torch_runtime import memory_errors
from multigpu_worker.engines.finetune.plan import Plan
from multigpu_worker.engines.finetune.settings import BAD_INPUT, MICRO_BATCH, OUT_OF_MEMORY, DivergedError, Settings
from multigpu_worker.engines.finetune.training import finetune
from multigpu_worker.repository.model import ModelFolderError


def main(path: Path) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of libraries, to their callers
    settings = Settings.read(path)
    plans: list[Plan] = []
    try:
        with memory_errors():
            finetune(settings, plans.append)
    except (TextsError, ModelFolderError, DivergedError) as error:
        _end(str(error), BAD_INPUT)
    except MemoryError as error:
        why = str(error).partition("\n")[0]
        if not plans or plans[0].micro_batch == 1:
            _end(f"it can't be trained in this memory: {why}", 1)
        micro = plans[0].micro_batch // 2
        fresh = settings.folder / f".{MICRO_BATCH}.{os.getpid()}"
        fresh.write_text(str(micro))
        fresh.replace(settings.folder / MICRO_BATCH)
        _end(f"passes of {plans[0].micro_batch} ran out of memory, {micro} are tried: {why}", OUT_OF_MEMORY)


def _end(why: str, code: int) -> None:
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os._exit(code)  # threads of torch may wait for ranks that have ended


if __name__ == "__main__":
    main(Path(sys.argv[1]))
