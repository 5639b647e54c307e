"""Tasks of kind "train": jobs that run a script written for torchrun, for the clients and the workers' engines.

A job's name is the request_id of its task and the name of its folder. Its events are the task's partial outputs.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from multigpu._encoding import JSON, decode
from multigpu._kinds.finetuning import Finetune, read_finetune

KIND = "train"
# The folder of jobs, in a worker's train_dir.
JOBS = "jobs"
# Variables that a rank's script gets: the job's folder, the file for what it reports, and where its checkpoints are.
FOLDER_VARIABLE, REPORTS_VARIABLE = "MULTIGPU_JOB_FOLDER", "MULTIGPU_JOB_REPORTS"
CHECKPOINTS_VARIABLE = "MULTIGPU_JOB_CHECKPOINTS"
HANG_TIMEOUT_MAX_S = 7 * 86_400
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a training job runs."""

    name: str
    # A path of the workers' hosts, absolute or relative to their train_dir. Empty: multigpu's own, which fine-tunes.
    script: str
    args: tuple[str, ...] = ()
    # How often the script is run again after it has ended with an error.
    retries: int = 0
    # A folder of the workers' hosts, or a URL that fsspec knows. Empty: in the job's folder.
    checkpoints: str = ""
    # Seconds without a sign of life of any rank, after which the job is ended. 0.0: never.
    hang_timeout_s: float = 0.0
    # The options of the task, so that it can be submitted again.
    options: Mapping[str, Any] = field(default_factory=dict)
    # What multigpu's own script needs.
    finetune: Finetune | None = None

    def payload(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "script": self.script,
            "args": [*self.args],
            "retries": self.retries,
            "checkpoints": self.checkpoints,
            "hang_timeout_s": self.hang_timeout_s,
            "options": {**self.options},
            "finetune": self.finetune and self.finetune.plain(),
        }

    def without_texts(self) -> Job:
        """For its events. The texts are in the job's folder."""
        return self if self.finetune is None else replace(self, finetune=replace(self.finetune, texts=""))


def job_of(
    script: str | os.PathLike[str], args: Sequence[str], name: str, retries: int, checkpoints: str,
    hang_timeout_s: float, options: Mapping[str, Any], finetune: Finetune | None = None,
) -> Job:  # fmt: skip
    """A new job. ValueError, TypeError: it can't be one. Without a name, it gets one."""
    if isinstance(args, str):
        raise TypeError("args is a list of the script's arguments, not a str")
    stem = re.sub(r"[^A-Za-z0-9]+", "-", finetune.model if finetune else Path(script).stem).strip("-")[:40] or "job"
    name = name or f"{stem}-{secrets.token_hex(4)}"
    kept = {key: value for key, value in options.items() if key not in ("timeout", "deadline")}
    return checked(
        Job(
            name=name,
            script=str(script),
            args=tuple(map(str, args)),
            retries=retries,
            checkpoints=checkpoints,
            hang_timeout_s=hang_timeout_s,
            options=kept,
            finetune=finetune,
        )
    )


def read_job(value: Any) -> Job:
    """The job of a payload or of an event. ValueError: it is none."""
    names = {each.name for each in fields(Job)}
    if isinstance(value, dict) and value.keys() == names and _has_types(value):
        given = value["finetune"]
        finetune = None if given is None else read_finetune(given, value["options"].get("world_size") or 1)
        return checked(Job(**value | {"args": tuple(value["args"]), "finetune": finetune}))
    raise ValueError(f"a job is a JSON object with {', '.join(sorted(names))}: see Client.train")


def _has_types(value: dict[str, Any]) -> bool:
    texts = (value["name"], value["script"], value["checkpoints"])
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(value["args"], list)
        and all(isinstance(each, str) for each in value["args"])
        and type(value["retries"]) is int
        and type(value["hang_timeout_s"]) in (int, float)
        and isinstance(value["options"], dict)
    )


def read_payload(payload: bytes, content_type: str) -> Job:
    """ValueError: it is none."""
    return read_job(decode(payload, content_type) if content_type == JSON else json.loads(payload))


def tell(event: dict[str, Any]) -> None:
    """Of a script: tells its engine of an event, if it has one."""
    path = os.environ.get(REPORTS_VARIABLE)
    if path:
        # A full disk may have cut the last line off: begin a new one. Readers ignore empty lines.
        line = "\n" + json.dumps(event | {"time": time.time()}, allow_nan=False) + "\n"
        with open(path, "ab", buffering=0) as file:  # noqa: PTH123  it is fast
            file.write(line.encode())


def report_text(event: Mapping[str, Any]) -> str:
    """What a script has reported, in one line: "step 20, loss 2.31"."""
    parts = [f"step {event['step']}"] if event.get("step") is not None else []
    parts += [
        f"{name} {value if isinstance(value, str) else f'{value:.5g}'}" for name, value in event["metrics"].items()
    ]
    return ", ".join(parts)


def checked(job: Job) -> Job:
    if not _NAME.fullmatch(job.name):
        raise ValueError(
            f"{job.name!r} can't be the name of a job: it takes 1 to 64 letters, digits, dots, hyphens and underscores"
        )
    if bool(job.script) == bool(job.finetune) or any("\0" in each for each in (job.script, job.checkpoints, *job.args)):
        raise ValueError("the script's path is empty, or a path or an argument holds a NUL")
    if job.finetune and job.checkpoints:
        raise ValueError("checkpoints of a job that fine-tunes are in its folder")
    if job.checkpoints and "://" not in job.checkpoints and not Path(job.checkpoints).is_absolute():
        raise ValueError(
            f"checkpoints is {job.checkpoints!r}; it must be an absolute path of the workers' hosts or a URL"
        )
    if not 0 <= job.retries <= 1000:
        raise ValueError(f"retries is {job.retries}; it must be 0 to 1000")
    if not (job.hang_timeout_s == 0 or 1 <= job.hang_timeout_s <= HANG_TIMEOUT_MAX_S):
        raise ValueError(f"hang_timeout_s is {job.hang_timeout_s}; it must be 1 to {HANG_TIMEOUT_MAX_S:,}, or 0: never")
    return job
