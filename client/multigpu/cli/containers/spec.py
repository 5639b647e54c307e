"""What runs in a container: the server of each API, its command line, and the equivalent `docker run`."""

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path

API_LABEL, MODEL_LABEL, DEVICES_LABEL = "multigpu.api", "multigpu.model", "multigpu.devices"
RESTART = "unless-stopped"
# Where SELinux is enforced, a container can use GPUs and mounted files only without its label.
PODMAN_SECURITY = "label=disable"
# In the container. Servers written in Rust look for a token in HF_HOME/token; they don't read HF_TOKEN_PATH.
HOME, CACHE, TOKEN = "/data", "/data/hub", "/data/token"


@dataclass(frozen=True, slots=True)
class Api:
    """A model server. `port`: in the container. `gpus_flag`: for the number of GPUs; empty: it uses one GPU."""

    image: str
    port: int
    model_flag: str
    gpus_flag: str
    shm_gib: int


APIS = {
    "tgi": Api("ghcr.io/huggingface/text-generation-inference:3.3.7", 80, "--model-id", "--num-shard", 1),
    "tei": Api("ghcr.io/huggingface/text-embeddings-inference:cuda-1.9.3", 80, "--model-id", "", 1),
    "vllm": Api("docker.io/vllm/vllm-openai:v0.26.0", 8000, "--model", "--tensor-parallel-size", 16),
}


def cache_dir() -> Path:
    """Hugging Face's cache of models on this host, found as huggingface_hub finds it."""
    home = os.environ.get("HF_HOME", os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", home + "/hub")).expanduser().absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A container to start. `devices`: indexes or UUIDs of GPUs. `port`: on 127.0.0.1. `env`: more variables."""

    name: str
    api: str
    model: str
    devices: tuple[str, ...]
    image: str
    port: int
    env: dict[str, str]
    token_file: Path | None

    def command(self) -> list[str]:
        server = APIS[self.api]
        gpus = [server.gpus_flag, str(len(self.devices))] if server.gpus_flag else []
        return [server.model_flag, self.model, *gpus]

    def environment(self) -> dict[str, str]:
        token = {"HF_TOKEN_PATH": TOKEN} if self.token_file else {}
        return {"HF_HOME": HOME, "HUGGINGFACE_HUB_CACHE": CACHE} | token | self.env

    def mounts(self) -> list[tuple[Path, str, bool]]:
        """Source, target, and whether it is read-only."""
        return [(cache_dir(), CACHE, False), *([(self.token_file, TOKEN, True)] if self.token_file else [])]

    def labels(self) -> dict[str, str]:
        return {API_LABEL: self.api, MODEL_LABEL: self.model, DEVICES_LABEL: ",".join(self.devices)}

    def cdi_names(self) -> list[str]:
        return [f"nvidia.com/gpu={device}" for device in self.devices]

    def run_words(self, engine: str) -> list[str]:
        """The words of `docker run` or `podman run` that start the same container."""
        server = APIS[self.api]
        words = [engine, "run", "--detach", "--name", self.name]
        if engine == "podman":
            words += [word for name in self.cdi_names() for word in ("--device", name)]
            words += ["--security-opt", PODMAN_SECURITY]
        else:
            words += ["--gpus", _csv("device=" + ",".join(self.devices))]
        words += ["--shm-size", f"{server.shm_gib}g", "--restart", RESTART]
        words += ["--publish", f"127.0.0.1:{self.port}:{server.port}"]
        for source, target, read_only in self.mounts():
            fields = ["type=bind", f"source={source}", f"target={target}", *(["readonly"] if read_only else [])]
            words += ["--mount", _csv(*fields)]
        words += [word for pair in self.environment().items() for word in ("--env", "=".join(pair))]
        words += [word for pair in self.labels().items() for word in ("--label", "=".join(pair))]
        return [*words, self.image, *self.command()]


def _csv(*fields: str) -> str:
    """A line of CSV: so the engines read --gpus and --mount."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()
