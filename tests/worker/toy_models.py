"""Toy models for tests: a user's engine without torch, whose memory and loading time are parameters in model.toml.

`Shop` is a repository of them. The result of a task has the model, the pid of its process, the model's `words` and the
payload. Payloads such as "sleep 1" or "die" make the engine wait or end its process.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINE = """
import fcntl, os, signal, time, sys

class Rejected(Exception):
    retryable = False

class Toy:
    one_by_one = False

    def __init__(self, settings):
        (self.model, self.spec), = settings.models.items()
        self.slots = settings.slots

    def load(self):
        p = self.spec.parameters
        time.sleep(float(p.get("load_s", "0")))
        if "crash" in p:
            signal.raise_signal(signal.SIGSEGV)  # not os.kill: another thread may take that, and this one go on
        signs = p["signs"] + "/" + self.spec.id.replace(":", "-")
        while os.path.exists(signs + ".hang"):
            time.sleep(0.01)
        if os.path.exists(signs + ".error"):
            raise ValueError(open(signs + ".error").read())
        if "memory_error" in p:
            raise MemoryError("no room on the device")
        if os.path.exists(p.get("beside", "")):
            raise MemoryError("no room beside the other")
        if "holds" in p:
            open(p["holds"], "w").close()
        if "locks" in p:  # until the process ends, which takes long
            self.locked = open(p["locks"], "w")
            fcntl.flock(self.locked, fcntl.LOCK_EX)
        if "rejected" in p:
            raise Rejected("it loses too much at int8")
        self.ballast = bytearray(os.urandom(1024)) * (int(p.get("size_bytes", "0")) // 1024)
        self.words = (self.spec.folder / "words.txt").read_text()
        self.facts = {"engine": "toy", "precision": "fp32", "words": self.words}
        return self.facts

    def prepare(self, batch):
        for item in batch.items:
            kind, _, argument = item.payload.decode().partition(" ")
            if kind == "prepare":
                open(argument + ".begun", "w").close()
                while not os.path.exists(argument):
                    time.sleep(0.01)

    def run(self, batch, prepared, reporter):
        for item in batch.items:
            kind, _, argument = item.payload.decode().partition(" ")
            if kind == "sleep":
                time.sleep(float(argument))
            elif kind == "wait":
                open(argument + ".begun", "w").close()
                while not reporter.cancelled(item):
                    time.sleep(0.01)
                open(argument, "w").close()
            elif kind == "die":
                os.kill(os.getpid(), 9)
            elif kind == "fact":
                self.facts["plan"] = argument
            asked = item.payload.decode()
            if kind == "partials":
                asked += " " + b",".join(item.partials).decode()
            answer = f"{batch.model}|{os.getpid()}|{self.words}|{asked}"
            reporter.succeed(item, answer.encode())

    def close(self):
        if "closed" in self.spec.parameters:
            open(self.spec.parameters["closed"], "a").write("closed\\n")
        if "locks" in self.spec.parameters:
            time.sleep(600)
        if "holds" in self.spec.parameters:
            os.unlink(self.spec.parameters["holds"])
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a task of a toy model."""

    model: str
    pid: int
    words: str
    asked: str

    @classmethod
    def of(cls, result: bytes) -> "Answer":
        model, pid, words, asked = result.decode().split("|", 3)
        return cls(model, int(pid), words, asked)


class Shop:
    """A model repository with toy models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._signs = folder.parent / "signs"
        self._signs.mkdir(exist_ok=True)

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--model-repository", str(self.folder), "--repository-poll-s", "0.1")

    def add(self, name: str, version: str = "", *, words: str = "", **parameters: Any) -> Path:
        """Add a model, or a version of one, by an atomic rename. `parameters`: of model.toml, see ENGINE."""
        folder = self.folder / name / version if version else self.folder / name
        parameters |= {"signs": self._signs}
        making = self.folder.parent / f"making-{name}-{version}"
        (making / version).mkdir(parents=True)
        (making / version / "toy_engine.py").write_text(ENGINE)
        (making / version / "words.txt").write_text(words or f"I am {name}")
        lines = ['engine = "toy_engine:Toy"', "[parameters]"]
        lines += [f"{key} = {json.dumps(str(value))}" for key, value in parameters.items()]
        (making / "model.toml").write_text("\n".join(lines) + "\n")
        if version and folder.parent.exists():  # the first version's model.toml is for all versions
            (making / version).rename(folder)
        else:
            making.rename(self.folder / name)
        return folder

    def sign(self, model: str, what: str) -> Path:
        """The file that, while it exists, makes a load of the model hang ("hang") or fail with its text ("error")."""
        return self._signs / f"{model.replace(':', '-')}.{what}"
