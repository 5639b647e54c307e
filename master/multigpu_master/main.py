"""mgpu-master: the command."""

import asyncio
import ctypes
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

# gRPC's own log writes text from peers to stderr unescaped. Set this before the import of grpc.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# gRPC's socket threads, its default since 1.80, slow down small messages: see docs/dependencies.md.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

from multigpu import _extras

if error := _extras.missing("mgpu-master", "master"):
    sys.exit(error)

from multigpu.daemon import grpcio_check

if error := grpcio_check.error("mgpu-master", "master"):
    sys.exit(error)

import click
import structlog
import uvloop
from google.protobuf.message import DecodeError
from multigpu._build import build_of
from multigpu.config.config import ConfigError, MasterConfig, TelemetryConfig, click_options, load
from multigpu.daemon.systemd import Notifier, raise_descriptor_limit
from multigpu.daemon.telemetry import configure_logging, configure_tracing, shut_down_tracing
from multigpu.v1 import task_pb2

from multigpu_master import VERSION, settings
from multigpu_master.clock import Clock
from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import Checks
from multigpu_master.journal.sqlite import backup as journal_backup
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.server import Master, SettingError, StartError
from multigpu_master.wire.specs import SpecReader

log = structlog.get_logger()
T = TypeVar("T")

EXIT_FAILED, EXIT_CONFIG, EXIT_NOT_DONE, EXIT_INCOMPLETE = 1, 2, 3, 4
# Python's default is 5 ms. With 0.5 ms, the journal's thread waits less for the GIL while the event loop is busy.
SWITCH_INTERVAL_S = 0.0005
# While one operation of the journal takes longer than this, the master does not notify systemd's watchdog.
JOURNAL_OPERATION_MAX_S = 60.0


@lru_cache(1000)
def _spec_damage(wire: bytes) -> str:
    try:
        SpecReader().restore(wire)
    except JournalError as error:
        return str(error).partition(". ")[0]
    return ""


def _body_damage(body: bytes) -> str:
    try:
        task_pb2.Outcome.FromString(body)
    except DecodeError as error:
        return f"the result is damaged ({error})"
    return ""


CHECKS = Checks(settings.damage_of, _spec_damage, _body_damage)


@click.group(invoke_without_command=True)
@click_options(MasterConfig)
@click.version_option(f"{VERSION} ({build_of('multigpu_master.driver')})", prog_name="mgpu-master")
@click.pass_context
def main(context: click.Context, /, config_file: str | None, **flags: Any) -> None:
    """The master daemon of multigpu: keeps the durable queue and dispatches tasks to workers.

    Exit codes: 0 stopped by a signal, 1 failed while running, 2 a wrong setting, 3 did not start (the message says
    why), 4 a backup was made of a journal that had lost data before.
    """
    try:
        config = _load_config(config_file, flags)
        telemetry = load(TelemetryConfig, file=config_file).config
        configure_tracing(telemetry, {"service.name": "mgpu-master", "service.version": VERSION})
    except ConfigError as error:
        click.echo(f"mgpu-master: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    if context.invoked_subcommand is not None:
        context.obj = config.data_dir
        return
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _use_few_arenas()
    try:
        code = uvloop.run(_serve(config, telemetry, lambda: _load_config(config_file, flags)))
    except StartError as error:
        click.echo(f"mgpu-master: {error}", err=True)
        code = EXIT_CONFIG if isinstance(error, SettingError) else EXIT_NOT_DONE
    shut_down_tracing()
    sys.stderr.flush()
    # Do not wait for the remaining threads, such as gRPC's poller or a thread that waits for a slow disk.
    os._exit(code)


@main.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.pass_obj
def backup(data_dir: Path, target: Path) -> None:
    """Copies the journal to TARGET, a new directory that a master can start from. A master may be running.

    Exit codes: 0 the copy is whole, 3 there is no copy (the message says why), 4 the copy lacks data that the journal
    had lost before the backup; the output lists these losses.
    """
    raise_descriptor_limit()  # the backup opens every segment
    lost = _or_exit(lambda: journal_backup.backup(data_dir, target, CHECKS))
    for line in lost:
        click.echo(f"not in the copy: {line}")
    if lost:
        click.echo(
            f"{target} is a copy of {data_dir} without the data lost there. Before a master starts from the copy, run "
            f"`mgpu-master --data-dir {target} salvage`, which removes the tasks whose payload is lost."
        )
        sys.exit(EXIT_INCOMPLETE)
    click.echo(
        f"{target} is a copy of {data_dir}. To restore it, stop the master and replace its data_dir with the copy."
    )


@main.command()
@click.pass_obj
def salvage(data_dir: Path) -> None:
    """Repairs a damaged journal, so that a master can start from it, and lists the losses. No master may be running."""
    gone = _or_exit(lambda: list(journal_backup.salvage(data_dir, CHECKS)))
    for line in gone:
        click.echo(f"gone: {line}")
    _or_exit(lambda: _try_journal(data_dir))
    click.echo(f"a master can start on {data_dir}; losses: {len(gone)}")


def _try_journal(data_dir: Path) -> None:
    """Opens the journal as a starting master does, which begins an incarnation. Reads all settings and tasks, and
    closes the journal. Raises JournalError if a master can't start.
    """
    journal = SqliteJournal(data_dir, size_max_bytes=MasterConfig().journal_bytes_max)
    recovered = journal.open(lambda *_commit: None)
    try:
        specs = SpecReader()
        for key, value in recovered.settings.items():
            if damage := settings.damage_of(key, value):
                raise JournalError(f"The setting {key!r} is damaged: {damage}.")
        for task in recovered.tasks:
            specs.restore(task.spec)
    finally:
        journal.close(JOURNAL_OPERATION_MAX_S)


def _or_exit(work: Callable[[], T]) -> T:
    try:
        return work()
    except (OSError, sqlite3.Error, JournalError) as error:
        click.echo(f"mgpu-master: {error}", err=True)
        sys.exit(EXIT_NOT_DONE)


def _load_config(config_file: str | None, flags: dict[str, Any]) -> MasterConfig:
    """Loads the settings, applies the log level and format, and returns the settings. Raises ConfigError if they are
    invalid.
    """
    config = load(MasterConfig, file=config_file, flags=flags).config
    configure_logging(config.log_level, config.log_format)
    return config


async def _serve(config: MasterConfig, telemetry: TelemetryConfig, reload_logging: Callable[[], object]) -> int:
    systemd, descriptors = Notifier(), raise_descriptor_limit()
    clock = Clock()
    journal = SqliteJournal(config.data_dir, now=clock.now, size_max_bytes=config.journal_bytes_max)
    master = Master(config, journal, clock, descriptors, telemetry)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, master.stop_requested.set)
    loop.add_signal_handler(signal.SIGHUP, systemd.reload, reload_logging, master.check_certificates)
    await master.start()
    systemd.ready(_status(master))
    notifying = asyncio.create_task(
        systemd.keep(lambda: journal.works(JOURNAL_OPERATION_MAX_S), lambda: _status(master))
    )
    await master.stop_requested.wait()
    notifying.cancel()
    systemd.stopping(master.fatal or "stopping")
    if master.fatal is None:
        log.info("master is stopping")
    await master.stop()
    return EXIT_FAILED if master.fatal is not None else 0


def _use_few_arenas() -> None:
    """Makes glibc's malloc use one heap for all threads but the first. With a heap for each thread, memory that a burst
    of calls leaves free on one thread cannot be used by another, and memory grows with every burst.
    """
    m_arena_max = -8  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_arena_max, 2)


def _status(master: Master) -> str:
    """Returns the text that `systemctl status` shows."""
    core = master.driver.core
    connected = sum(worker.session != 0 for worker in core.fleet.workers.values())
    journal = "" if master.driver.write_buffer.writable else "; NO ROOM for the journal"
    return f"{master.address}: {connected} workers connected, {core.ledger.unsettled} unsettled tasks{journal}"


if __name__ == "__main__":
    main()
