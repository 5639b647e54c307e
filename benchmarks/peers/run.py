"""Runs one peer through some workloads, in the peer's interpreter, without importing multigpu for the others.

    python peers_run.py PEERS_DIR MODULE[:CLASS] DIVISOR WORKLOAD...

Prints a line of JSON about the peer, and then one for each workload.
"""

import importlib
import json
import os
import sys
from typing import Any


def main(subject: str, divisor: int, workloads: list[str]) -> None:
    common: Any = importlib.import_module("common")
    module, _, name = subject.partition(":")
    peer: Any = getattr(importlib.import_module(module), name or "Peer")()
    todo = [w for w in workloads if w not in peer.skip]
    sizes = {"W1-bulk": peer.n_bulk, "W1-window64": peer.n_window, "W2": 2000, "W3": 200, "W4": 1000}
    try:
        peer.start()
        said = {"peer": peer.name, "durable": peer.durable, "version": peer.version()}
        print(json.dumps(said), flush=True)
        for workload in todo:
            work = common.WORKLOADS[workload]
            k = divisor
            if workload == "W4":
                k = 1  # fewer tasks would all be in the hands of a worker that takes batches when it is killed
                list(peer.stream("sleep", [b"warm%06d" % i for i in range(20)], 30))
            else:
                work(peer, 5 * divisor)
            found = common.measure(lambda work=work, k=k: work(peer, k))
            print(json.dumps({"workload": workload, "n": sizes[workload] // k, **found}), flush=True)
    finally:
        peer.stop()


if __name__ == "__main__":
    folder, subject, divisor, *workloads = sys.argv[1:]
    paths = [folder, f"{folder}/peers"]
    sys.path[:0] = paths
    # For the workers of the peer.
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    os.environ["OMP_NUM_THREADS"] = "1"
    main(subject, int(divisor), workloads)
