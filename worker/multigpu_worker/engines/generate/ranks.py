"""A model that several processes share: ranks, which all run each step. Rank 0 is the engine process.

transformers divides the model (tensor parallelism or a pipeline), and torch.distributed connects the ranks, by
Gloo on processors and NCCL on GPUs. Rank 0 starts the others (rank.py), and writes the input of each step to their
standard input. All load the model in the same way, so that they meet in the same collective calls.

If one rank ends, or a step fails on one, all end: what the others wait for will not come. The agent then starts the
engine again, and runs its tasks again. It logs what each rank has printed.
"""

import contextlib
import marshal
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import torch
import torch.distributed as dist

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.generate.cache import Piece
from multigpu_worker.engines.planning.ranks import check_pipeline, check_tensor_parallel
from multigpu_worker.engines.planning.structure import read_structure
from multigpu_worker.engines.planning.wish import PlanError
from multigpu_worker.repository.model import ModelFolderError, ModelSpec

# With torch 2.10, transformers' tensor parallelism fails in the first layer; versions between the two were not tried.
TENSOR_PARALLEL_TORCH = (2, 13)
LENGTH_BYTES = 8
END_TIMEOUT_S = 10.0
# What the other ranks have to know of the settings.
SETTINGS = ("device", "slots", "threads", "artifacts", "artifacts_bytes_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The share of this process."""

    rank: int
    tensor_parallel: int
    pipeline: int
    device: torch.device

    @property
    def size(self) -> int:
        return self.tensor_parallel * self.pipeline

    def from_pretrained(self) -> dict[str, Any]:
        """The arguments with which transformers loads this rank's share only. Raises ModelFolderError."""
        try:
            from transformers.distributed.configuration_utils import DistributedConfig  # noqa: PLC0415 (not in every version)

            return {"distributed_config": DistributedConfig(tp_size=self.tensor_parallel, pp_size=self.pipeline)}
        except (ImportError, TypeError) as error:
            raise ModelFolderError("tensor_parallel and pipeline need transformers 5.23 or newer") from error

    def least(self, value: int) -> int:
        """The least of the values of all ranks."""
        values = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MIN)
        return int(values.item())


def check_ranks(spec: ModelSpec) -> None:
    """Raises ModelFolderError: the model can't be divided so."""
    if spec.tensor_parallel > 1 and spec.pipeline > 1:  # transformers 5.23 raises KeyError
        raise ModelFolderError("the engine torch takes tensor_parallel or pipeline; vllm takes both")
    if spec.tensor_parallel > 1 and tuple(map(int, torch.__version__.split(".")[:2])) < TENSOR_PARALLEL_TORCH:
        raise ModelFolderError(
            f"tensor_parallel needs torch {'.'.join(map(str, TENSOR_PARALLEL_TORCH))} or newer, and torch "
            f"{torch.__version__} is installed: set pipeline instead, or use engine vllm"
        )
    structure = read_structure(spec, 4)
    try:
        if spec.pipeline > 1:
            check_pipeline(structure, spec.pipeline)
        else:
            check_tensor_parallel(structure, spec.tensor_parallel)
    except PlanError as error:
        raise ModelFolderError(f"{spec.folder}: {error}") from error


def join(spec: ModelSpec, settings: EngineSettings, rank: int, store: str) -> Rank:
    """Connect this process with the others. `store`: a file that all of them open."""
    # The ranks are on this host. Gloo would take the interface of the host's name.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    joined = Rank(
        rank=rank,
        tensor_parallel=spec.tensor_parallel,
        pipeline=spec.pipeline,
        device=torch.device("cpu" if settings.device == "cpu" else f"cuda:{rank}"),
    )
    # transformers reads them.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(joined.size)}
    on_cpu = joined.device.type == "cpu"
    dist.init_process_group(
        "gloo" if on_cpu else "nccl",
        store=dist.FileStore(store, joined.size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=joined.size,
        device_id=None if on_cpu else joined.device,
    )
    return joined


class RankGroup:
    """The other ranks, as seen by rank 0. Make it on a thread that lives as long as the process: see rank.py."""

    def __init__(self, spec: ModelSpec, settings: EngineSettings, precision: str) -> None:
        self._closing = False
        # A file without a name: rank 0 mostly ends by SIGKILL, and could not delete it. It is never closed: torch's
        # FileStore opens it again when it is destroyed, and another file would have its number then.
        store = f"/proc/{os.getpid()}/fd/{os.memfd_create('ranks')}"
        plain = {name: getattr(settings, name) for name in SETTINGS}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "multigpu_worker.engines.generate.rank", str(os.getpid())],
                stdin=subprocess.PIPE,
            )
            for _ in range(1, spec.ranks)
        ]
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
            _write(process, (spec.plain(), plain, precision, store, rank))
        self.own = join(spec, settings, 0, store)

    def send(self, pieces: Sequence[Piece], wanted: Sequence[int]) -> None:
        """The input of a step, to all other ranks."""
        plain = [(piece.token_ids, piece.start, piece.blocks) for piece in pieces], list(wanted)
        for process in self._processes:
            _write(process, plain)

    def end(self, reason: str) -> NoReturn:
        """End all ranks, since one can't go on."""
        sys.stderr.write(f"{reason}: all ranks of the model end\n")
        sys.stderr.flush()
        os._exit(1)  # the kernel kills the others

    def close(self) -> None:
        """End the others, which wait for a step."""
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            process.wait(END_TIMEOUT_S)
        dist.destroy_process_group()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if not self._closing:
            self.end(f"rank {rank} has ended with exit code {code}")


def _write(process: "subprocess.Popen[bytes]", plain: Any) -> None:
    assert process.stdin is not None
    data = marshal.dumps(plain)
    with contextlib.suppress(BrokenPipeError):  # its watcher ends this process
        process.stdin.write(len(data).to_bytes(LENGTH_BYTES) + data)
        process.stdin.flush()


def messages(source: BinaryIO) -> Iterator[Any]:
    """What rank 0 writes, until it ends."""
    while header := source.read(LENGTH_BYTES):
        yield marshal.loads(source.read(int.from_bytes(header)))  # noqa: S302 (from rank 0, which started this process)
