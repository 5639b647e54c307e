"""`mgpuctl containers deploy`: starts a model server, and waits until it answers."""

import contextlib
import http.client
import re
import shlex
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from multigpu._units import format_duration, format_size
from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.containers import engines, gpus
from multigpu.cli.containers.manage import log_lines
from multigpu.cli.containers.spec import APIS, Spec, cache_dir
from multigpu.cli.failures import Failure, WrongUsage
from multigpu.cli.options import json_option, key_values

POLL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
LINES_OF_A_FAILURE = 20
# What an engine answers about a container that is removed, and about one whose removal has begun.
GONE = (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.CONFLICT)
TOKENS = frozenset({"HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN"})


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl containers deploy --model facebook/opt-1.3b", "On the GPUs with the most free memory."),
        ("mgpuctl containers deploy --model facebook/opt-1.3b --api vllm --devices 0,2", "On these two."),
        ("mgpuctl containers deploy --model facebook/opt-1.3b --dry-run", "Only print the `docker run`."),
    ),
)
@click.option("--model", required=True, help="A model of Hugging Face.")
@click.option(
    "--api", "--api-type", "api", type=click.Choice([*APIS]), default="tgi", show_default=True,
    help="The server: text-generation-inference, text-embeddings-inference or vLLM.",
)  # fmt: skip
@click.option("--devices", type=gpus.parse_devices, metavar="GPU,GPU", help="GPUs by index or UUID.")
@click.option("--auto-select", is_flag=True, help="The GPUs with the most free memory. The default.")
@click.option("--engine", type=click.Choice(engines.ENGINES), default="docker", show_default=True, help="What runs it.")
@click.option("--image", help="Another image of this server.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port on 127.0.0.1.  [default: a free one]")
@click.option("--env", "variables", multiple=True, metavar="KEY=VALUE", help="Variable of the server. May be repeated.")
@click.option("--name", help="Name of the container.  [default: multigpu-API-MODEL]")
@click.option(
    "--hf-token-file", "token_file", type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    help="File with a token of Hugging Face.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the equivalent `docker run` or `podman run`, and start nothing.")
@json_option
def deploy(
    model: str, api: str, devices: tuple[str, ...] | None, auto_select: bool, engine: str, image: str | None,
    port: int | None, variables: tuple[str, ...], name: str | None, token_file: Path | None, dry_run: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Start a model server in a container on GPUs of this host, and wait until it answers.

    It sees the chosen GPUs alone, listens on 127.0.0.1, and shares Hugging Face's cache with this host. It is started
    again with the engine, until `stop`. Ctrl-C before it answers removes it.
    """
    env = key_values("--env", variables)
    if shown := sorted(TOKENS & env.keys()):
        raise WrongUsage(f"--env {shown[0]} would show the token to others on this host; use --hf-token-file")
    if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]+", name):
        raise WrongUsage(f"{name!r} is no name of a container; write letters, digits, '_', '.' and '-'")
    if model.startswith(("/", ".", "~")):
        raise WrongUsage(f"the container does not see {model}, a folder of this host: name a model of Hugging Face")
    if devices and auto_select:
        raise WrongUsage("--devices and --auto-select exclude each other")
    if devices and len(devices) > 1 and not APIS[api].gpus_flag:
        raise WrongUsage(f"{api} uses one GPU; --devices names {len(devices)}")
    spec = Spec(
        name=name or f"multigpu-{api}-" + re.sub(r"[^A-Za-z0-9_.-]", "-", model.rpartition("/")[2]),
        api=api, model=model, devices=devices or gpus.select(model, one=not APIS[api].gpus_flag),
        image=image or APIS[api].image, port=port or _free_port(), env=env, token_file=token_file,
    )  # fmt: skip
    if dry_run:
        if not cache_dir().exists():
            show.note(f"the mounted folder does not exist yet: mkdir -p {cache_dir()}")
        words = spec.run_words(engine)
        show.value({"command": words}) if as_json else show.line(shlex.join(words))
        return
    row = _start(engines.connect(engine), spec)
    if as_json:
        show.value(row)
    else:
        show.facts([(key, ",".join(value) if key == "devices" else value) for key, value in row.items()])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _start(engine: engines.Engine, spec: Spec) -> dict[str, Any]:
    """Starts a container, and waits until its server answers. An error or Ctrl-C removes it."""
    engine.check()
    with engines.engine_errors():
        cache_dir().mkdir(parents=True, exist_ok=True)
        _pull(engine, spec.image)
        container = None
        try:
            with _ctrl_c_deferred():
                container = engine.create(spec)  # its answer names the container to remove
            container.start()
            _wait(container, spec.port)
        except BaseException:
            if container is not None:
                _remove(container)
            raise
        return engine.row(container)


@contextlib.contextmanager
def _ctrl_c_deferred() -> Iterator[None]:
    """The first Ctrl-C in the block takes effect at its end. A second one takes effect at once."""
    interrupted = False

    def defer(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupted:
            signal.raise_signal(signal.SIGINT)


def _remove(container: Any) -> None:
    """Removes a container, also if somebody else has removed it or does so now."""
    try:
        container.remove(force=True, v=True)
    except engines.library().errors.APIError as error:
        if error.status_code not in GONE:
            raise


def _pull(engine: engines.Engine, image: str) -> None:
    """Fetches an image that the engine doesn't have."""
    docker = engines.library()
    with contextlib.suppress(docker.errors.ImageNotFound):
        engine.client.images.get(image)
        return
    repository, tag = docker.utils.parse_repository_tag(image)
    fetched: dict[str, int] = {}
    with _status(f"fetching {image}") as status:
        for event in engine.client.api.pull(repository, tag=tag or "latest", stream=True, decode=True):
            if "error" in event:
                raise Failure(f"{image}: {event['error']}")
            if event.get("status") == "Downloading":
                fetched[event["id"]] = event["progressDetail"].get("current", 0)
                status.update(Text(f"fetching {image}: {format_size(sum(fetched.values()))}"))


def _wait(container: Any, port: int) -> None:
    """Returns when the server answers. Raises Failure with its last lines if it ends before, or if it is removed."""
    begun = time.monotonic()
    try:
        with _status(f"waiting for {container.name}") as status:
            container.reload()
            while container.status == "running" and not container.attrs.get("RestartCount"):
                if _is_healthy(port):
                    return
                status.update(
                    Text(f"{format_duration(time.monotonic() - begun)}: {log_lines(container, 1)}", no_wrap=True)
                )
                time.sleep(POLL_S)
                container.reload()
        lines = log_lines(container, LINES_OF_A_FAILURE)
    except engines.library().errors.APIError as error:
        if error.status_code not in GONE:
            raise
        raise Failure(f"{container.name} was removed before it answered") from error
    raise Failure(f"{container.name} ended before it answered, and is removed. Its last lines:\n{lines}")


def _status(text: str) -> Any:
    """A line on stderr that changes on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        show.note(text)
    return console.status(Text(text))


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        # Closed here: a finalizer would drop the KeyboardInterrupt of a Ctrl-C that comes while it runs.
        with connection.getresponse() as response:
            return response.status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
