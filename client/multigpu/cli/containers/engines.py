"""Docker and Podman, both through the package `docker`: Podman's service speaks Docker's API as well."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigpu import _extras
from multigpu.cli.containers import spec
from multigpu.cli.failures import Failure, NotFound

ENGINES = ("docker", "podman")
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
# Before it, Podman's service ignores the GPUs that a container asks for.
PODMAN_MIN = (5, 4)


def library() -> Any:
    """The package docker. Ends the command if it is not installed."""
    if missing := _extras.missing("mgpuctl containers", "containers"):
        sys.exit(missing)
    import docker  # noqa: PLC0415  --dry-run and --help work without it

    return docker


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raises Failure for an error that an engine answers, and if it does not answer."""
    errors = library().errors
    try:
        yield
    except errors.APIError as error:
        raise Failure(error.explanation or str(error)) from error
    except (errors.DockerException, OSError) as error:  # those of requests are OSErrors
        raise Failure(str(error)) from error


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that answers. `client`: a docker.DockerClient. Methods raise Failure, and the errors of docker."""

    name: str
    version: str
    client: Any

    def is_too_old(self) -> bool:
        return self.name == "podman" and tuple(map(int, re.findall(r"\d+", self.version)[:2])) < PODMAN_MIN

    def gives_gpus_by(self) -> str:
        """How it can give GPUs to containers, as far as it tells; empty if it can't."""
        if self.is_too_old():
            return ""
        if self.name == "podman":  # its API doesn't tell
            files = [path for folder in CDI_FOLDERS for path in Path(folder).glob("*.*")]
            return "CDI" if any("nvidia.com/gpu" in path.read_text("utf-8", "replace") for path in files) else ""
        info = self.client.info()
        if "nvidia" in info.get("Runtimes", {}):
            return "NVIDIA's runtime"
        devices = info.get("DiscoveredDevices") or []
        return "CDI" if any(each["ID"].startswith("nvidia.com/gpu=") for each in devices) else ""

    def check(self) -> None:
        """Raises Failure if a container would not get the GPUs that are asked for."""
        if self.is_too_old():
            raise Failure(f"Podman {self.version} ignores the GPUs that its API is asked for; 5.4 is needed")

    def create(self, wanted: spec.Spec) -> Any:
        """A new container, not yet started."""
        types, server = library().types, spec.APIS[wanted.api]
        if self.name == "docker":
            gpus = types.DeviceRequest(device_ids=[*wanted.devices], capabilities=[["gpu"]])
        else:
            gpus = types.DeviceRequest(driver="cdi", device_ids=wanted.cdi_names())
        return self.client.containers.create(
            wanted.image, wanted.command(), name=wanted.name, environment=wanted.environment(), labels=wanted.labels(),
            device_requests=[gpus], security_opt=[spec.PODMAN_SECURITY] if self.name == "podman" else [],
            shm_size=server.shm_gib << 30, restart_policy={"Name": spec.RESTART},
            ports={f"{server.port}/tcp": ("127.0.0.1", wanted.port)},
            mounts=[types.Mount(to, str(source), "bind", read_only=ro) for source, to, ro in wanted.mounts()],
        )  # fmt: skip

    def servers(self) -> list[Any]:
        """The containers that `mgpuctl containers deploy` made."""
        of_ours = {"label": spec.API_LABEL}
        return self.client.containers.list(all=True, filters=of_ours, ignore_removed=True)  # type: ignore[no-any-return]

    def row(self, container: Any) -> dict[str, Any]:
        """For JSON: a container of ours."""
        bindings = (container.attrs["HostConfig"]["PortBindings"] or {}).values()
        return {
            "name": container.name,
            "api": container.labels[spec.API_LABEL],
            "model": container.labels[spec.MODEL_LABEL],
            "devices": container.labels[spec.DEVICES_LABEL].split(","),
            "state": container.status,
            "url": "".join(f"http://127.0.0.1:{each[0]['HostPort']}" for each in bindings),
            "engine": self.name,
            "id": container.id,
        }


def connect(name: str) -> Engine:
    """The engine of this name. Raises Failure if it does not answer.

    Docker is found by DOCKER_HOST, the current Docker context, or its default socket; Podman by CONTAINER_HOST, or the
    socket of the user's service, else of the system's.
    """
    docker = library()
    own = Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}"), "podman/podman.sock")
    podman = os.environ.get("CONTAINER_HOST", f"unix://{own if own.exists() else '/run/podman/podman.sock'}")
    try:
        with engine_errors():
            client = docker.from_env() if name == "docker" else docker.DockerClient(podman, version="auto")
            version = client.version()
    except Failure as error:
        address = podman if name == "podman" else os.environ.get("DOCKER_HOST", "its default address")
        raise Failure(f"{name} does not answer at {address}: {error.message}") from error
    components = {each["Name"] for each in version.get("Components") or ()}
    answered = "podman" if "Podman Engine" in components else "docker"
    if answered != name:
        raise Failure(f"at the address of {name}, {answered} answers: use --engine {answered}")
    return Engine(name, version["Version"], client)


def answering() -> tuple[list[Engine], dict[str, str]]:
    """The engines that answer; and why the others don't, by name."""
    found, errors = [], {}
    for name in ENGINES:
        try:
            found.append(connect(name))
        except Failure as error:
            errors[name] = error.message
    return found, errors


def servers() -> list[tuple[Engine, Any]]:
    """Our containers on all engines that answer. Raises Failure if none does, and the errors of docker."""
    found, errors = answering()
    if not found:
        raise Failure("; ".join(errors.values()))
    return [(engine, each) for engine in found for each in engine.servers()]


def named(name: str) -> Any:
    """Our container of this name. Raises NotFound; else as `servers`."""
    for _, container in servers():
        if container.name == name:
            return container
    raise NotFound(f"there is no model server {name!r}; `mgpuctl containers list` shows them")
