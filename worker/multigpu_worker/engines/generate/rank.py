"""One of the ranks 1 and up of a model: loads its share, and runs each step that rank 0 sends (ranks.py).

    python -m multigpu_worker.engines.generate.rank PID_OF_RANK_0

The kernel kills it when rank 0 ends. If it can't go on, it ends, and rank 0 with it.
"""

import os
import select
import sys
import traceback
from typing import Any

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.torch_runtime import bind
from multigpu_worker.engines.generate.cache import Piece
from multigpu_worker.engines.generate.model import load_model
from multigpu_worker.engines.generate.ranks import join, messages
from multigpu_worker.process_group import die_with_parent
from multigpu_worker.repository.model import ModelSpec

# All ranks see most errors of a model, and rank 0 reports them to the agent first.
ERROR_DELAY_S = 5.0


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    arriving = messages(sys.stdin.buffer)
    try:
        _serve(next(arriving), arriving)
    except BaseException:  # noqa: BLE001  whatever it is, this rank can't go on
        traceback.print_exc()
        sys.stderr.flush()
        select.select([sys.stdin], [], [], ERROR_DELAY_S)
        os._exit(1)
    os._exit(0)  # threads of the libraries may hang at the end


def _serve(first: Any, steps: Any) -> None:
    plain, settings, precision, store, rank = first
    spec = ModelSpec.from_plain(plain)
    settings = EngineSettings(**settings, models={spec.id: spec})
    bind(settings.threads, tf32=precision == "tf32")
    model = load_model(spec, settings, precision, join(spec, settings, rank, store))
    for pieces, wanted in steps:
        model.forward([Piece(token_ids=ids, start=start, blocks=blocks) for ids, start, blocks in pieces], wanted)


if __name__ == "__main__":
    main()
