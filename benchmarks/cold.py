"""Time to the result from a model that is not loaded, against loading it in a process: `python -m benchmarks.cold`.

Two copies of MiniLM on a CPU worker with room for one, in turns: each task needs a load, and the unloading of the other
model. The baseline is the same model in a new process, to its first vector: from the start of the process, and from the
end of its imports. Fleet and baseline take turns; the figure is the median.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from multigpu import Client
from multigpu_worker.repository.folders import packaged_model

from benchmarks.measure import median
from tests.fleet import Fleet

TEXT = "One sentence."
# More than one MiniLM takes with torch, less than two.
ROOM = "500MiB"
_PLAIN = """
import sys, time
from pathlib import Path
import torch, transformers, transformers.modeling_utils, transformers.models.auto
imported_s = time.monotonic()
from multigpu_worker.repository.model import ModelSpec
from multigpu.v1 import embed_pb2
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.embed.torch_backend import load
spec = ModelSpec(name="m", folder=Path(sys.argv[1]))
model, _ = load(spec, EngineSettings(device="cpu", slots=1, threads=1, models={"m": spec}), "fp32")
tokens = model.text.tokenise([sys.argv[2]])
assert model.embed(model.text.pad(tokens, [0])).shape == (1, 384)
print(time.monotonic() - imported_s)
"""


def baseline(folder: Path) -> tuple[float, float]:
    """Seconds from the start of the process, and from when its imports were done."""
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN, str(folder), TEXT], stdout=subprocess.PIPE, text=True, check=True
    )
    return time.monotonic() - began_s, float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rest-s", type=float, default=8.0, help="between two, for the next spare process to be ready")
    args = parser.parse_args()
    folder = packaged_model()
    assert folder is not None, "install multigpu[minilm]"
    whole_s, loaded_s, fleet_s = [], [], []
    with tempfile.TemporaryDirectory() as name:
        for copy in "ab":
            shutil.copytree(folder, Path(name, "models", copy))
        flags = ("--model-repository", f"{name}/models", "--model-memory-bytes", ROOM, "--threads", "1")
        with Fleet(Path(name, "fleet"), workers=1, worker_flags=flags) as fleet, Client(fleet.address) as client:
            client.embed([TEXT], model="b")
            for turn in range(args.rounds):
                wanted = "ab"[turn % 2]
                time.sleep(args.rest_s)
                began_s = time.monotonic()
                client.embed([TEXT], model=wanted)
                fleet_s.append(time.monotonic() - began_s)
                time.sleep(args.rest_s)  # the spare of the next turn must not be in the way
                times = baseline(folder)
                whole_s.append(times[0])
                loaded_s.append(times[1])
    print(f"fleet, from the call to the vector, with another model's end: {median(fleet_s):.2f} s")
    print(f"baseline, from its start: {median(whole_s):.2f} s ({median(fleet_s) / median(whole_s):.2f} times)")
    print(f"baseline, imports done: {median(loaded_s):.2f} s ({median(fleet_s) / median(loaded_s):.2f} times)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
