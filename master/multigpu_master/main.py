"""mgpu-master: the command."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import click
import structlog
import uvloop
from multigpu.config import ConfigError, MasterConfig, TelemetryConfig, click_options, load
from multigpu.systemd import Notifier
from multigpu.telemetry import configure_logging, configure_tracing, shut_down_tracing

from multigpu_master import VERSION
from multigpu_master.journal_sqlite import SqliteJournal
from multigpu_master.metrics import MasterMetrics
from multigpu_master.server import Master, Refusal

log = structlog.get_logger()

EXIT_FAILED, EXIT_REFUSED = 1, 3
# The journal's thread does short work while the loop is busy: it must not wait 5 ms for each turn.
SWITCH_INTERVAL_S = 0.0005
# A piece of the journal's work that takes longer than this is no progress for systemd's watchdog.
JOURNAL_PATIENCE_S = 60.0


@click.command()
@click_options(MasterConfig)
@click.version_option(VERSION, prog_name="mgpu-master")
def main(config_file: str | None, **flags: Any) -> None:
    """The master daemon of multigpu: holds the durable queue and gives tasks to the workers.

    Exit codes: 0 stopped by a signal, 1 failed while running, 2 usage, 3 refused to start (the message says why).
    """
    try:
        config = load(MasterConfig, file=config_file, flags=flags).config
        telemetry = load(TelemetryConfig, file=config_file).config
        configure_logging(config.log_level, config.log_format)
        configure_tracing(telemetry, {"service.name": "mgpu-master", "service.version": VERSION})
    except ConfigError as error:
        click.echo(f"mgpu-master: {error}", err=True)
        sys.exit(EXIT_REFUSED)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        code = uvloop.run(_serve(config, telemetry, lambda: _load_log_level(config_file, flags)))
    except Refusal as refusal:
        click.echo(f"mgpu-master: {refusal}", err=True)
        code = EXIT_REFUSED
    shut_down_tracing()
    sys.stderr.flush()
    # Whatever thread is left (a gRPC poller, a slow disk) must not hold up the end.
    os._exit(code)


def _load_log_level(config_file: str | None, flags: dict[str, Any]) -> None:
    """ConfigError: the settings are wrong by now."""
    config = load(MasterConfig, file=config_file, flags=flags).config
    configure_logging(config.log_level, config.log_format)


async def _serve(config: MasterConfig, telemetry: TelemetryConfig, load_log_level: Callable[[], None]) -> int:
    systemd = Notifier()
    journal = SqliteJournal(config.data_dir, size_max_bytes=config.journal_bytes_max, address=config.listen)
    master = Master(config, journal)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, master.stopped.set)
    loop.add_signal_handler(signal.SIGHUP, systemd.reload, load_log_level, master.reload)
    await master.start()
    metrics = MasterMetrics(master.driver, config, telemetry)
    metrics.start()
    systemd.ready(_status(master))
    telling = asyncio.create_task(systemd.keep(lambda: journal.works(JOURNAL_PATIENCE_S), lambda: _status(master)))
    await master.stopped.wait()
    telling.cancel()
    systemd.stopping(master.fatal or "stopping")
    if master.fatal is None:
        log.info("master is stopping")
    await master.stop()
    metrics.stop()
    return EXIT_FAILED if master.fatal is not None else 0


def _status(master: Master) -> str:
    """For `systemctl status`."""
    core = master.driver.core
    connected = sum(worker.session != 0 for worker in core.fleet.workers.values())
    journal = "" if master.driver.journaling.writable else "; NO ROOM for the journal"
    return f"{master.address}: {connected} workers connected, {core.unsettled} unsettled tasks{journal}"


if __name__ == "__main__":
    main()
