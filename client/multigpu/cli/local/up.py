"""`mgpuctl up`: a local fleet in the foreground, for trials, tests, and machines without systemd.

This module plans the fleet; supervisor.py keeps it alive.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from multigpu import _extras
from multigpu.cli.commands import Command
from multigpu.cli.failures import Failure, WrongUsage
from multigpu.cli.local.fleet_log import FleetLog
from multigpu.cli.local.gpus import usable_gpus
from multigpu.cli.local.supervisor import ChildSpec, Supervisor
from multigpu.cli.options import Number, config_option, load_config
from multigpu.config import config

CPU_WORKERS_DEFAULT = 2
STRATEGIES = ("round_robin", "memory_usage", "compute_load", "task_type", "static_partition", "least_loaded", "auto")
# Of the time of a stop: the workers' share, and of that the share for draining.
WORKERS_STOP_SHARE = 0.7
DRAIN_SHARE = 0.6
READY_PROBE = "ready"
# Two signals within this time count as one: `timeout` sends each to the process and to its group.
IMPATIENCE_S = 0.3
# Exit codes of mgpu-master: wrong settings; a rejected journal.
MASTER_REJECTIONS = frozenset({2, 3})
# Exit codes of mgpu-gateway: wrong settings.
GATEWAY_REJECTIONS = frozenset({2})
# Exit codes of mgpu-worker: wrong settings; an engine that can't start; a master of another protocol version.
WORKER_REJECTIONS = frozenset({2, 3, 4})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A planned fleet: its processes and their flags."""

    address: str
    data_dir: Path
    master_flags: tuple[str, ...]
    # worker_id -> flags.
    workers: dict[str, tuple[str, ...]]
    # Where the gateway serves HTTP and gRPC, and its flags; empty: there is none.
    http: str
    grpc: str
    gateway_flags: tuple[str, ...]
    stop_timeout_s: float
    ready_file: Path | None
    log_json: bool


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl up", "One worker for each GPU, else two on the CPU."),
        ("mgpuctl up --workers 4 --data-dir /tmp/try", "Four workers, and a separate journal."),
        ("mgpuctl up --handlers my_module", "Serve the @multigpu.handler functions of my_module.py."),
        ("mgpuctl up --model-repository /srv/models", "Serve every model of a folder."),
        ("mgpuctl up --listen 127.0.0.1:0 --ready-file /tmp/ready", "A free port, written to /tmp/ready."),
    ),
    exits=(
        ("0", "Stopped as asked."),
        ("1", "The fleet can't run: the master or a worker did not start, or died each time."),
        ("2", "The command line or the configuration is wrong."),
    ),
)
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    envvar="WORKER_COUNT",  # of earlier deployments, as LOAD_BALANCING_STRATEGY
    show_envvar=True,
    help="How many workers.  [default: one for each GPU, else 2 on the CPU]",
)
@click.option("--listen", metavar="HOST:PORT", help="Where the master listens; port 0 picks a free one.")
@click.option("--data-dir", metavar="DIR", help="Where the master keeps its journal.")
@click.option("--strategy", metavar="NAME", help="How tasks are placed, until `mgpuctl strategy set`.")
@click.option(
    "--device", metavar="auto|cpu|cuda:N|rocm:N", help="What the workers run on; cuda:0,cuda:1 is one worker with two "
    "GPUs.  [default: auto]",
)  # fmt: skip
@click.option("--handlers", multiple=True, metavar="MODULE", help="Serve this module's handlers. May be repeated.")
@click.option("--allow-pickle", is_flag=True, help="Let handlers take and return pickles (docs/security.md).")
@click.option("--train-dir", metavar="DIR", help="Run the training scripts of this folder (docs/training.md).")
@click.option("--model", "models", multiple=True, metavar="NAME=PATH", help="Serve this model. May be repeated.")
@click.option("--model-repository", metavar="DIR", help="Serve the models of this folder (docs/models.md).")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label of every worker. May be repeated.")
@click.option("--slots", metavar="N", help="Tasks a worker's handlers run at once.")
@click.option("--threads", metavar="N", help="Threads of each engine.  [default: on the CPU, cores / workers]")
@click.option("--http", metavar="HOST:PORT", help="Where the gateway serves HTTP; port 0 picks a free one.")
@click.option("--grpc", metavar="HOST:PORT", help="Where it serves Triton's gRPC service; port 0 picks a free one.")
@click.option("--no-gateway", is_flag=True, help="Serve neither.")
@click.option("--stop-timeout", type=Number(min=0.5), default=15.0, show_default=True, metavar="SECONDS")
@click.option("--ready-file", type=click.Path(path_type=Path), help="Written once every worker is connected.")
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
@config_option
def up(**options: Any) -> None:
    """Run a master, its workers and a gateway here, until Ctrl-C.

    Processes that die are restarted; nothing that was acknowledged is lost. Prints a line that begins with "ready:" to
    stdout once every worker is connected; logs go to stderr. On Ctrl-C or SIGTERM the workers finish their running
    tasks, then the master stops; a second signal ends everything at once.
    """
    ready_file = options["ready_file"]
    if ready_file is not None and (ready_file.is_dir() or not os.access(ready_file.parent, os.W_OK)):
        raise WrongUsage(f"--ready-file {ready_file} can't be written: name a file in an existing folder")
    for extra in ("master", "worker") if options["no_gateway"] else ("master", "worker", "gateway"):
        if error := _extras.missing("mgpuctl up", extra):
            sys.exit(error)
    fleet = plan_fleet(options)
    sys.exit(asyncio.run(run_fleet(fleet)))


def plan_fleet(options: dict[str, Any]) -> Fleet:
    """The fleet by the command line, the environment and the config file."""
    master_flags = {name: options[name] for name in ("listen", "data_dir", "strategy", "log_level")}
    loaded = load_config(config.MasterConfig, flags=master_flags)
    master = loaded.config
    strategy = options["strategy"]
    if loaded.sources["strategy"] == "default":
        strategy = old_strategy()
    names = ("device", "handlers", "train_dir", "models", "model_repository", "labels", "slots", "threads")
    worker_flags = {name: options[name] for name in names}
    worker_flags |= {"log_level": options["log_level"], "allow_pickle": options["allow_pickle"] or None}
    worker = load_config(config.WorkerConfig, flags=worker_flags).config

    log_format = master.log_format if master.log_format != "auto" else "console" if sys.stderr.isatty() else "json"
    common = ("--log-format", log_format, "--log-level")
    http, grpc, gateway_flags = "", "", tuple[str, ...]()
    with contextlib.ExitStack() as probes:
        listen, address = choose_addresses(master.listen, probes)
        if not options["no_gateway"]:
            http, grpc, gateway_flags = plan_gateway(options, address, common, probes)
    stop_timeout_s: float = options["stop_timeout"]
    drain_s = min(worker.drain_timeout_s, stop_timeout_s * DRAIN_SHARE)
    given = [
        (config.flag_name(name), value) for name, value in worker_flags.items() if name not in ("device", "threads")
    ]
    passed_on = [
        (flag,) if part is True else (flag, part)
        for flag, value in given
        if value is not None
        for part in (value if isinstance(value, tuple) else (value,))
        if flag != "--log-level"
    ]
    workers = {}
    planned = plan_workers(options["workers"], worker)
    for worker_id, device, threads in planned:
        flags: list[tuple[object, ...]] = [("--master", address), ("--worker-id", worker_id)]
        flags += [("--device", device), ("--threads", threads)]
        flags += [("--drain-timeout-s", f"{drain_s:g}"), *passed_on]
        twins = sum(other == device for _, other, _ in planned)
        flags.append(("--device-workers", max(twins, worker.device_workers)))
        workers[worker_id] = (*(str(word) for flag in flags for word in flag), *common, worker.log_level)
    return Fleet(
        address=address,
        data_dir=master.data_dir,
        master_flags=(
            *("--listen", listen, "--data-dir", str(master.data_dir)),
            *(("--strategy", strategy) if strategy else ()),
            *common,
            master.log_level,
        ),
        workers=workers,
        http=http,
        grpc=grpc,
        gateway_flags=gateway_flags,
        stop_timeout_s=stop_timeout_s,
        ready_file=options["ready_file"],
        log_json=log_format == "json",
    )


def plan_gateway(
    options: dict[str, Any], master: str, common: tuple[str, ...], probes: contextlib.ExitStack
) -> tuple[str, str, tuple[str, ...]]:
    """Its addresses for HTTP and gRPC, and its flags. `common`: the flags of every daemon."""
    gateway = load_config(config.GatewayConfig, flags={name: options[name] for name in ("http", "grpc")}).config
    try:
        http = choose_addresses(gateway.http, probes)
        grpc = choose_addresses(gateway.grpc, probes) if gateway.grpc else ("", "")
    except Failure as failure:
        message = f"{failure.message}; the gateway takes --http and --grpc, or --no-gateway leaves it out"
        raise Failure(message) from None
    flags = ("--master", master, "--http", http[0], "--grpc", grpc[0], *common, gateway.log_level)
    return http[1], grpc[1], flags


def old_strategy() -> str:
    """LOAD_BALANCING_STRATEGY of earlier deployments; "" if it is not set."""
    name = os.environ.get("LOAD_BALANCING_STRATEGY", "")
    if name and name not in STRATEGIES:
        raise WrongUsage(f"LOAD_BALANCING_STRATEGY: there is no strategy {name!r}; take one of {', '.join(STRATEGIES)}")
    return name


def plan_workers(count: int | None, worker: config.WorkerConfig) -> list[tuple[str, str, int]]:
    """Worker id, device and threads of each worker. Ids are the same for every `up`."""
    host = socket.gethostname()
    gpus: list[tuple[str, str]] = []
    if worker.device != "cpu":
        try:
            gpus = list(usable_gpus().items())
        except RuntimeError as error:
            raise Failure(f"{error}; repair the driver, or run on the CPU with --device cpu") from error
    if worker.device.startswith("MIG-"):
        gpus = [(worker.device, worker.device)]
    elif "," in worker.device:
        return [_group(worker, dict(gpus), count)]
    elif worker.device not in ("auto", "cpu"):
        gpus = [gpu for gpu in gpus if worker.device in gpu]
        if not gpus:
            raise WrongUsage(f"there is no {worker.device} here; `nvidia-smi -L` or `amd-smi list` lists the devices")
    if not gpus:
        count = CPU_WORKERS_DEFAULT if count is None else count
        threads = worker.threads or max(1, len(os.sched_getaffinity(0)) // max(count, 1))
        return [(f"{host}-cpu-{index}", "cpu", threads) for index in range(count)]
    count = len(gpus) if count is None else count
    plan = []
    for index in range(count):
        device, uuid = gpus[index % len(gpus)]
        # The first worker of a GPU has mgpu-worker's default id; further ones are numbered.
        twin = index // len(gpus)
        plan.append((f"{host}-{uuid}" + (f"-{twin}" if twin else ""), device, worker.threads))
    return plan


def _group(worker: config.WorkerConfig, gpus: dict[str, str], count: int | None) -> tuple[str, str, int]:
    """The worker that owns several GPUs. `gpus`: name -> UUID of those of this host."""
    if count not in (None, 1):
        raise WrongUsage(f"--device {worker.device} is one worker with several GPUs: leave out --workers {count}")
    names = worker.device.split(",")
    if missing := [name for name in names if name not in gpus and name not in gpus.values()]:
        raise WrongUsage(f"there is no {missing[0]} here; `nvidia-smi -L` or `amd-smi list` lists the devices")
    # As mgpu-worker's default id.
    return f"{socket.gethostname()}-{gpus.get(names[0], names[0])}+{len(names) - 1}", worker.device, worker.threads


def choose_addresses(listen: str, probes: contextlib.ExitStack) -> tuple[str, str]:
    """The listen address and the address for clients. Port 0 becomes a free port; a taken port raises Failure.

    `probes` keeps the port taken until it is closed: two daemons of a fleet never get the same free port.
    """
    if listen.startswith("unix:"):
        return listen, listen
    host, _, port_text = listen.rpartition(":")
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    probe = probes.enter_context(socket.socket(family, socket.SOCK_STREAM))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((bare, int(port_text)))
        probe.listen()  # two bound sockets with SO_REUSEADDR may share a port; two listening ones may not
    except OSError as error:
        remedy = "another master may run there; stop it, or choose another port with --listen"
        raise Failure(f"can't listen at {listen}: {error.strerror or error}; {remedy}") from error
    port = probe.getsockname()[1]
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104  addresses to connect to
    return f"{host}:{port}", f"{everywhere.get(bare, host)}:{port}"


async def run_fleet(fleet: Fleet) -> int:
    """Runs the fleet until a signal or a process that can't run. Returns the exit code."""
    names = ["master", "gateway", "up", *fleet.workers]
    log = FleetLog(as_json=fleet.log_json, names=names)
    log.event("up", f"the journal of this fleet is in {fleet.data_dir}")

    def on_event(name: str, text: str) -> None:
        if name != READY_PROBE:
            log.event(name, text)
        elif supervisor.finished_once.get(READY_PROBE) == 0:
            supervisor.proven = True
            announce(fleet)
        elif not supervisor.stop_asked.is_set():
            log.event("up", f"can't tell whether the fleet is ready: the probe {text}")

    reasons: dict[str, str] = {}  # the last complaint of each child

    def on_line(name: str, text: str) -> None:
        if text.startswith(("mgpu-master: ", "mgpu-worker: ")):
            reasons[name] = text.partition(": ")[2]
        log.line(name, text)

    supervisor = Supervisor(on_line=on_line, on_event=on_event)
    ask_to_stop_on_signals(supervisor)
    if fleet.ready_file is not None:
        fleet.ready_file.unlink(missing_ok=True)
    python = (sys.executable, "-m")
    argv = (*python, "multigpu_master.main", *fleet.master_flags)
    master = supervisor.add(ChildSpec(name="master", argv=argv, rejections=MASTER_REJECTIONS))
    workers = [
        supervisor.add(
            ChildSpec(
                name=worker_id,
                argv=(*python, "multigpu_worker.main", *flags),
                rejections=WORKER_REJECTIONS,
                may_recover=True,
            )
        )
        for worker_id, flags in fleet.workers.items()
    ]
    gateways = []
    if fleet.http:
        argv = (*python, "multigpu_gateway.main", *fleet.gateway_flags)
        spec = ChildSpec(name="gateway", argv=argv, rejections=GATEWAY_REJECTIONS)
        gateways = [supervisor.add(spec)]
    argv = (*python, "multigpu.cli.ready", fleet.address, fleet.http, *fleet.workers)
    supervisor.add(ChildSpec(name=READY_PROBE, argv=argv, once=True))

    await supervisor.stop_asked.wait()
    log.event("up", "stopping: the workers finish their running tasks, then the master stops")
    workers_s = fleet.stop_timeout_s * WORKERS_STOP_SHARE
    await supervisor.stop((gateways + workers, workers_s), ([master], fleet.stop_timeout_s - workers_s))
    if fleet.ready_file is not None:
        fleet.ready_file.unlink(missing_ok=True)
    if supervisor.rejected is None:
        return 0
    name = supervisor.rejected.spec.name
    log.event("up", f"{name} can't run: {reasons.get(name, 'its last lines above say why')}")
    return Failure.exit_code


def announce(fleet: Fleet) -> None:
    """Reports that the fleet is ready, on stdout and in the ready file."""
    count = len(fleet.workers)
    served = f", HTTP at http://{fleet.http}" if fleet.http else ""
    served += f", gRPC at {fleet.grpc}" if fleet.grpc else ""
    text = f"ready: master {fleet.address}, {count} worker{'' if count == 1 else 's'}{served}\n"
    if fleet.ready_file is not None:
        fresh = fleet.ready_file.with_name(fleet.ready_file.name + ".new")
        fresh.write_text(text, "utf-8")
        fresh.replace(fleet.ready_file)
    with contextlib.suppress(BrokenPipeError):  # the reader has gone; the fleet runs on
        os.write(sys.stdout.fileno(), text.encode())


def ask_to_stop_on_signals(supervisor: Supervisor) -> None:
    """The first signal asks for an orderly stop, a later one ends everything."""
    loop = asyncio.get_running_loop()
    impatient_after = 0.0

    def stop() -> None:
        nonlocal impatient_after
        if not supervisor.stop_asked.is_set():
            supervisor.stop_asked.set()
            impatient_after = loop.time() + IMPATIENCE_S
        elif loop.time() >= impatient_after:
            supervisor.kill_all()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
