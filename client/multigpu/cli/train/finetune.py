"""`mgpuctl train finetune`."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from multigpu import Client
from multigpu._kinds.documentation import texts_of
from multigpu._kinds.finetuning import CHOICES, Finetune, FinetuneOptions, read_texts
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, WrongUsage
from multigpu.cli.options import Number
from multigpu.cli.sdk_errors import sdk_session
from multigpu.cli.train.run import given_options, start, task_options

_FIELDS = {each.name: each for each in dataclasses.fields(Finetune)}


def _tuning_options(command: Any) -> Any:
    """An option for each of FinetuneOptions, with its text."""
    for name, text in reversed(texts_of(FinetuneOptions).items()):
        if name == "world_size":
            kind: Any = click.IntRange(1, 1024)
        elif name in CHOICES:
            kind = click.Choice(CHOICES[name])
        else:
            kind = {int: click.INT, float: click.FLOAT, str: click.STRING}[type(_FIELDS[name].default)]
        shown = " ".join(text.replace("`", "").split())
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, type=kind, help=f"{shown[0].upper()}{shown[1:]}")(command)
    return command


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl train finetune --model chat --data texts.jsonl", "All weights, on one worker."),
        ("mgpuctl train finetune --model chat --data texts.jsonl --method lora --world-size 4", "On four."),
        ("mgpuctl train finetune --model chat --data-on-workers big.jsonl --name night --detach", "In the background."),
    ),
    exits=EXIT_CODES,
)
@click.option("--model", required=True, metavar="MODEL", help="Of the workers' model repository: NAME or NAME:VERSION.")
@click.option("--data", type=click.Path(path_type=Path), metavar="FILE", help="The texts: JSON lines. It is sent.")
@click.option("--data-on-workers", "file", default="", metavar="FILE", help="In place of --data: in their train_dir.")
@click.option("--name", default="", metavar="NAME", help="The job and its folder.  [default: made from the model's]")
@click.option(
    "--hang-timeout", "hang_timeout_s", type=Number(min=0), default=0.0, metavar="SECONDS",
    help="End an attempt in which no rank writes or reports anything for this time.  [default: never]",
)  # fmt: skip
@_tuning_options
@task_options
def finetune(model: str, data: Path | None, file: str, name: str, address: str, detach: bool, **given: Any) -> None:
    """Fine-tune a language model on given texts, and serve the result.

    Each line of FILE is a JSON object {"text": "…"}. The result is a new version in the workers' model repository,
    which they serve after their next scan; the folder must be the same for all hosts. As other jobs, it survives the
    end of every process, and goes on without this command. Options that are not given have the defaults that their
    texts say.
    """
    if (data is None) == (not file):
        both = ", not both" if file else ""
        raise WrongUsage(f"give the texts, as --data FILE or, if the workers have them, --data-on-workers FILE{both}")
    texts = []
    if data is not None:
        try:
            texts = read_texts(data)
        except OSError as error:
            raise WrongUsage(f"--data: {error.strerror}: {data}") from error
        except ValueError as error:
            raise WrongUsage(f"--data: {error}") from error
        if not texts:
            raise WrongUsage(f"--data: there are no texts in {data}")
    options = given_options(given)
    with sdk_session(), Client(address) as client:
        start(client, lambda: client.finetune(model, texts, file=file, name=name, **options), name, detach=detach)
