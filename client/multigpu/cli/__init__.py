"""mgpuctl: the command line for operators and users, one command in each file.

Nothing here imports grpc, numpy or rich: `mgpuctl --help` must answer at once, and `up` must fork without them.
"""

import errno
import os
import signal
import sys
import warnings

from multigpu import __version__, _extras

if error := _extras.missing("mgpuctl", "cli"):
    sys.exit(error)

import click

# gRPC would log the errors that mgpuctl prints. It reads the variable when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from multigpu.cli import show
from multigpu.cli.commands import LazyGroup
from multigpu.cli.failures import EXIT_CODES, INTERRUPTED, TERMINATED, Failure, TerminatedError
from multigpu.cli.options import MASTER_HELP, Globals, config_option

COMMANDS = {
    "up": ("multigpu.cli.local.up:up", "Run a master, its workers and a gateway here, until Ctrl-C."),
    "status": ("multigpu.cli.fleet.workers:status", "State of the master: tasks waiting and done, workers, journal."),
    "workers": ("multigpu.cli.fleet.workers:workers", "Every worker that the master knows: state, device and load."),
    "gpus": ("multigpu.cli.fleet.gpus:gpus", "Every device of the fleet: model, load and health."),
    "top": ("multigpu.cli.fleet.top:top", "A live view of devices, queues and running tasks, until Ctrl-C."),
    "drain": ("multigpu.cli.fleet.workers:drain", "Give workers no new tasks and let theirs finish."),
    "cordon": ("multigpu.cli.fleet.workers:cordon", "Give workers no new tasks."),
    "uncordon": ("multigpu.cli.fleet.workers:uncordon", "End a cordon or a drain: the workers take tasks again."),
    "check": ("multigpu.cli.fleet.workers:check", "Have workers check their devices."),
    "forget": ("multigpu.cli.fleet.workers:forget", "Remove lost workers from the master's list."),
    "breaker": ("multigpu.cli.fleet.breaker:breaker", "See and reset the circuit breaker of sick devices."),
    "models": ("multigpu.cli.models.models:models", "See, plan, load and unload models: what is loaded where."),
    "handlers": ("multigpu.cli.fleet.handlers:handlers", "Have workers reload your handlers, one after the other."),
    "submit": ("multigpu.cli.tasks.submit:submit", "Submit tasks, and optionally wait for their results."),
    "embed": ("multigpu.cli.kinds.embed:embed", "Embed lines of text: one vector for each line, in order."),
    "generate": ("multigpu.cli.kinds.generate:generate", "Continue a prompt, or answer it: text as it is generated."),
    "infer": ("multigpu.cli.kinds.infer:infer", "Run arrays through MODEL."),
    "classify": ("multigpu.cli.kinds.classify:classify", "Classify pictures, or lines of text, with MODEL."),
    "train": ("multigpu.cli.train:train", "Run training scripts written for torchrun on several workers."),
    "bench": ("multigpu.cli.bench.bench:bench", "Measure a fleet with MODEL, and compare it with a plain loop."),
    "tasks": ("multigpu.cli.tasks.tasks:tasks", "See, fetch, cancel and explain tasks."),
    "strategy": ("multigpu.cli.fleet.strategy:strategy", "See or change how tasks are placed on workers."),
    "queues": ("multigpu.cli.tasks.queues:queues", "See, pause, resume and limit queues."),
    "energy": (
        "multigpu.cli.energy:energy",
        "The energy of a model, measured on this host; and what the fleet's tasks use of devices and energy.",
    ),
    "containers": (
        "multigpu.cli.containers:containers",
        "Model servers in containers, on chosen GPUs of this host.",
    ),
    "dead-letters": (
        "multigpu.cli.tasks.dead_letters:dead_letters",
        "See, requeue and delete tasks that failed every attempt.",
    ),
    "watch": ("multigpu.cli.tasks.watch:watch", "Print outcomes as they come."),
    "tokens": ("multigpu.cli.security.tokens:tokens", "Make, list and revoke the access tokens of a master."),
    "certs": ("multigpu.cli.security.certs:certs", "Make and renew the certificates of a fleet."),
    "doctor": ("multigpu.cli.doctor.doctor:doctor", "Check this host and its fleet: verdicts and remedies."),
    "config": ("multigpu.cli.about:config_", "Show the settings in force."),
}


@click.group(
    cls=LazyGroup,
    entries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    examples=(
        ("mgpuctl up &", "A master and its workers on this machine."),
        ("mgpuctl status", "The state of both."),
        ("mgpuctl submit --kind echo --payload hi --wait", "One task, there and back."),
        ("mgpuctl embed corpus.txt -o vectors.npy", "One vector for each line."),
    ),
    exits=EXIT_CODES,
)
@click.option("--master", metavar="HOST:PORT", default=None, help=MASTER_HELP)
@config_option
@click.version_option(__version__, message="mgpuctl %(version)s")
@click.pass_context
def cli(context: click.Context, master: str | None) -> None:
    """Run and operate a multigpu fleet, and give it tasks.

    Every command has --help with examples; most have --json for pipes.
    """
    context.obj = Globals(master=master)


# A full disk, a closed stream, a broken device.
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.EIO})


def main() -> None:
    """The entry point of mgpuctl."""
    signal.signal(signal.SIGTERM, _terminate)
    _open_streams()
    try:
        exit_code = cli.main(prog_name="mgpuctl", standalone_mode=False)
    except click.exceptions.Abort as error:
        # The signal may have come before a coroutine that was just made could begin.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        sys.exit(TERMINATED if isinstance(error.__cause__, TerminatedError) else INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        show.discard_stdout()
        show.note(f"mgpuctl: can't write: {error.strerror}")
        sys.exit(Failure.exit_code)
    sys.exit(exit_code if isinstance(exit_code, int) else 0)


def _open_streams() -> None:
    """Opens closed standard streams: else the next file or socket would get their descriptors."""
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            # A stdout that was closed is opened for reading: writing to it must fail.
            stream = os.fdopen(os.open(os.devnull, flags), "r" if name == "stdin" else "w")
            setattr(sys, name, stream)


def _terminate(*_: object) -> None:
    raise TerminatedError
