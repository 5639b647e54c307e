"""`mgpuctl generate`: text from a prompt, as it is generated.

Only the text goes to stdout, for pipes. A model's text is untrusted: a terminal gets it without control characters.
"""

import sys
import time
from typing import Any

import click

from multigpu import Client
from multigpu._kinds.generation import KIND, Generated, Prompt
from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, Failure
from multigpu.cli.options import Number, json_option, master_option, submit_options
from multigpu.cli.presence import loading_notes, wait_for_worker
from multigpu.cli.sdk_errors import cancelled_at_end, sdk_session
from multigpu.cli.tasks.lines import DASH, open_input
from multigpu.cli.text import clean

# Limit of the payload's integers.
COUNT_MAX = 2**32 - 1


@click.command(
    cls=Command,
    examples=(
        ('mgpuctl generate "The capital of France is"', "Continues the text."),
        ('mgpuctl generate --chat "What is a lease?"', "Asks, in the model's chat format."),
        ("cat report.txt | mgpuctl generate --system 'Sum it up.' -", "A prompt from standard input."),
        ('mgpuctl generate "Once upon" --temperature 0.8 --seed 7', "Random, and repeatable with the same seed."),
        ('mgpuctl generate "1, 2," --max-tokens 20 --stop 9 --json', "The whole answer as one value."),
        ('mgpuctl generate "1, 2," --json-lines', "Each piece as it comes, then the whole."),
    ),
    exits=EXIT_CODES,
)
@click.argument("prompt")
@click.option("--model", default="", metavar="NAME", help="[default: the workers' own]")
@click.option("--max-tokens", type=click.IntRange(1, COUNT_MAX), metavar="N", help="At most N tokens.  [default: 256]")
@click.option(
    "--temperature",
    type=Number(0, 2),
    metavar="T",
    help="0: always the most likely token; higher: more random.  [default: 0]",
)
@click.option(
    "--top-p",
    type=Number(0, 1, min_open=True),
    metavar="P",
    help="Draw from the most likely tokens with this probability together.",
)
@click.option(
    "--top-k", type=click.IntRange(0, COUNT_MAX), metavar="K", help="Draw from the K most likely tokens; 0: from all."
)
@click.option("--repetition-penalty", type=Number(0.01, 100), metavar="X", help="Above 1: fewer repetitions.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. May be repeated.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="The same seed gives the same text.")
@click.option("--chat", is_flag=True, help="The prompt is a message to the model, not a text to continue.")
@click.option("--system", default="", metavar="TEXT", help="The system message of the conversation; implies --chat.")
@submit_options
@click.option("--json-lines", "as_lines", is_flag=True, help="A JSON object for each piece; the last is the whole.")
@master_option
@json_option
def generate(
    prompt: str,
    model: str,
    chat: bool,
    system: str,
    address: str,
    wait_s: float | None,
    as_lines: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Continue a prompt, or answer it: text as it is generated.

    "-" reads the prompt from standard input. If a worker dies, another continues. Ctrl-C cancels.
    """
    asked = prompt_of(prompt, system, chat=chat)
    options = {name: value for name, value in given.items() if value not in (None, "", ())}
    with sdk_session():
        wait_for_worker(address, KIND, model, timeout_s=wait_s, say=show.note)
        started_at = time.monotonic()
        with Client(address) as client:
            # A worker was connected a moment ago: if the last one dies now, the task waits for its restart.
            generation = client.generate(asked, model=model, stream=True, wait_for_worker=True, **options)
            with cancelled_at_end(generation), loading_notes(address, KIND, model, show.note) as answered:
                for piece in generation:
                    answered.set()
                    if as_lines:
                        line({"text": piece})
                    elif not as_json:
                        write(piece)
    if as_lines:
        line(summary(generation.result, time.monotonic() - started_at))
    elif as_json:
        show.value(summary(generation.result, time.monotonic() - started_at))
    elif sys.stdout.isatty():
        show.line()


def prompt_of(text: str, system: str, *, chat: bool) -> Prompt:
    """The prompt of the command line. Raises Failure if standard input is not UTF-8."""
    if text == DASH:
        try:
            text = open_input(DASH).read().decode()
        except UnicodeDecodeError as error:
            raise Failure(f"standard input is not UTF-8 ({error}); convert it first: iconv -t utf-8") from error
    if not chat and not system:
        return text
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": text}]


def write(piece: str) -> None:
    """Prints a piece of the text at once."""
    if sys.stdout.isatty():
        piece = "\t".join(map(clean, piece.split("\t")))
    show.raw(piece.encode())


def line(value: dict[str, Any]) -> None:
    """Prints a JSON object on one line at once."""
    show.line(show.as_json(value))


def summary(result: Generated, seconds: float) -> dict[str, Any]:
    """The whole answer as JSON."""
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "tokens": len(result.token_ids),
        "token_ids": list(result.token_ids),
        "seconds": round(seconds, 3),
        "worker": result.worker_id,
    }
