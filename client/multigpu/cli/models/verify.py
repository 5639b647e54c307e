"""`mgpuctl models verify`: compares the files of models with their recorded hashes. Needs no master."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click

from multigpu.cli import show, tables
from multigpu.cli.commands import Command
from multigpu.cli.failures import Failure
from multigpu.cli.options import json_option
from multigpu.cli.progress import Progress
from multigpu.cli.tables import Column
from multigpu.cli.text import format_size
from multigpu.repository.files import Problem, digest, file_hash, loaded_files
from multigpu.repository.files import verify as compare
from multigpu.repository.hashes import write_hashes
from multigpu.repository.model import ModelFolderError, ModelSpec
from multigpu.repository.model_toml import read_toml
from multigpu.repository.scan import is_model, model_folders, read_model

OK, DIFFERS, UNRECORDED, BROKEN, WRITTEN = "ok", "differs", "not recorded", "broken", "written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result for one version of a model."""

    model: str
    status: str
    folder: str
    files: int = 0
    files_bytes: int = 0
    digest: str = ""
    problems: list[Problem] = field(default_factory=list)


COLUMNS = (
    Column("MODEL", lambda verdict: verdict.model),
    Column("STATUS", lambda verdict: verdict.status),
    Column("FILES", lambda verdict: str(verdict.files), right=True),
    Column("SIZE", lambda verdict: format_size(verdict.files_bytes), right=True),
    Column("DIGEST", lambda verdict: verdict.digest[:16]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The folder of a model, its versions, and the errors of unreadable versions by id."""

    folder: Path
    specs: list[ModelSpec]
    errors: dict[str, str]


@click.command(
    "verify",
    cls=Command,
    examples=(
        ("mgpuctl models verify /srv/models", "Every model of a repository."),
        ("mgpuctl models verify /srv/models/acme/reranker --write", "Record the files as they are now."),
    ),
    exits=(("1", "A file differs, can't be read, or no hashes are recorded."),),
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False))
@click.option("--write", is_flag=True, help="Record the hashes of the files as they are now, in model.toml.")
@json_option
def verify(paths: tuple[str, ...], write: bool, as_json: bool) -> None:
    """Compare the files of models with the hashes in their model.toml.

    PATH is a model repository, a folder in it, or the folder of one model. Every version is read, served or not.
    """
    models = [model for path in paths for model in _models(Path(path))]
    if not models:
        raise Failure(f"there is no model in {', '.join(paths)}")
    total = sum(spec.files_bytes for model in models for spec in model.specs)
    with Progress("bytes", total, quiet=as_json) as progress:
        verdicts = [verdict for model in models for verdict in _judge(model, write, progress.add)]
    if as_json:
        show.value([dataclasses.asdict(verdict) for verdict in verdicts])
    else:
        _print(verdicts)
    bad = sum(verdict.status not in (OK, WRITTEN) for verdict in verdicts)
    if bad:
        raise Failure(f"{bad} of {len(verdicts)} are not as recorded")


def _models(path: Path) -> list[Model]:
    errors: dict[str, str] = {}
    try:
        whole = is_model(path)
    except ModelFolderError as error:
        raise Failure(str(error)) from error
    folders = [(path.absolute().name, path)] if whole else list(model_folders(path, "", errors))
    models = []
    for name, folder in folders:
        try:
            # The links of a model that is named by itself may lead anywhere.
            specs, broken = read_model(folder, name, None if whole else path, every_version=True)
        except ModelFolderError as error:
            specs, broken = [], {name: str(error)}
        models.append(Model(folder=folder, specs=specs, errors=broken))
    return [*models, *(Model(folder=path, specs=[], errors={name: text}) for name, text in errors.items())]


def _judge(model: Model, write: bool, on_bytes: Callable[[int], None]) -> list[Verdict]:
    verdicts = [_broken(name, model.folder, text) for name, text in model.errors.items()]
    hashes: dict[str, str] = {}
    if write and model.specs:
        # Versions that can't be read now keep their recorded hashes.
        unread = tuple(f"{name.partition(':')[2]}/" for name in model.errors)
        hashes = {name: value for name, value in _recorded(model).items() if name.startswith(unread)}
    for spec in model.specs:
        try:
            files = loaded_files(spec)
            problems: list[Problem] = []
            if write:
                under = f"{spec.version}/" if spec.version else ""
                hashes |= {under + name: file_hash(spec.folder / name, on_bytes) for name in files}
            else:
                problems = compare(spec, on_bytes)
            verdict = Verdict(
                model=spec.id,
                status=WRITTEN if write else DIFFERS if problems else OK if spec.hashes else UNRECORDED,
                folder=str(spec.folder),
                files=len(files),
                files_bytes=spec.files_bytes,
                digest=digest(spec) if spec.hashes or write else "",
                problems=problems,
            )
        except ModelFolderError as error:
            verdict = dataclasses.replace(_broken(spec.id, spec.folder, str(error)), files_bytes=spec.files_bytes)
        verdicts.append(verdict)
    if hashes:
        try:
            write_hashes(model.folder, hashes)
        except ModelFolderError as error:
            raise Failure(str(error)) from error
    return verdicts


def _broken(name: str, folder: Path, message: str) -> Verdict:
    return Verdict(model=name, status=BROKEN, folder=str(folder), problems=[Problem(file="", message=message)])


def _recorded(model: Model) -> dict[str, str]:
    try:
        recorded: dict[str, str] = read_toml(model.folder).get("hashes", {})
    except ModelFolderError:
        return {}
    return recorded


def _print(verdicts: list[Verdict]) -> None:
    tables.show_rows(verdicts, COLUMNS)
    for verdict in verdicts:
        for problem in verdict.problems:
            show.note(f"{verdict.model}: {problem.file} {problem.message}".replace(":  ", ": "))
        if verdict.status == UNRECORDED:
            show.note(f"{verdict.model}: no hashes are recorded in its model.toml; record them with --write")
