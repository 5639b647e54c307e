"""deploy/compose.yaml and deploy/Dockerfile, read without Docker: flags, files, and what other hosts can reach."""

import re
from typing import Any

import click
import multigpu_gateway.main
import multigpu_master.main
import multigpu_worker.main
import pytest
import yaml
from multigpu.config.config import GatewayConfig, MasterConfig, WorkerConfig, load
from multigpu_master.security import listeners

from tests.deploy.deployment import ROOT

DEPLOY = ROOT / "deploy"
PROGRAMS: dict[str, tuple[click.Command, Any]] = {
    "master": (multigpu_master.main.main, MasterConfig),
    "worker": (multigpu_worker.main.main, WorkerConfig),
    "gateway": (multigpu_gateway.main.main, GatewayConfig),
}


def compose() -> dict[str, Any]:
    """The file, with the defaults of its variables."""
    text = (DEPLOY / "compose.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    return found


def config_of(service: str) -> Any:
    """The configuration with which a service runs its program. ClickException: a flag is wrong."""
    program, *arguments = compose()["services"][service]["command"]
    assert program == f"mgpu-{service}"
    command, cls = PROGRAMS[service]
    with command.make_context(program, arguments) as context:
        flags = {name: value for name, value in context.params.items() if name != "config_file"}
    image = (DEPLOY / "Dockerfile").read_text("utf-8")
    env = dict(re.findall(r"\b(MGPU_\w+)=(\S+)", image))
    assert env
    return load(cls, flags=flags, env=env).config


def test_the_daemons_accept_their_flags() -> None:
    master, worker, gateway = config_of("master"), config_of("worker"), config_of("gateway")
    listeners.check(master)
    multigpu_gateway.main.check_listener(gateway)
    assert worker.master == gateway.master == f"master:{master.listen.rpartition(':')[2]}"
    health = " ".join(compose()["services"]["worker"]["healthcheck"]["test"])
    assert f" {worker.master}  {worker.worker_id}" in health


def test_prometheus_scrapes_what_the_daemons_serve() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    groups = [group for job in config["scrape_configs"] for group in job["static_configs"]]
    targets = [target for group in groups for target in group["targets"]]
    served = {"master": config_of("master").metrics_listen, "gateway": config_of("gateway").http}
    assert targets == [f"{name}:{address.rpartition(':')[2]}" for name, address in served.items()]


def test_the_fleet_is_reached_on_this_host_only() -> None:
    services, networks = compose()["services"], compose()["networks"]
    assert networks["fleet"] == {"internal": True}
    assert services["master"]["networks"] == services["worker"]["networks"] == ["fleet"]
    assert {name for name, service in services.items() if "ports" in service} == {"gateway", "prometheus", "grafana"}
    for name, service in services.items():
        assert "network_mode" not in service, name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
    assert "fleet" not in services["grafana"]["networks"]


def test_grafana_needs_a_password() -> None:
    settings = compose()["services"]["grafana"]["environment"]
    assert settings["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert settings["GF_AUTH_ANONYMOUS_ENABLED"] == "false"


@pytest.mark.parametrize("name", ["master", "worker", "gateway", "prometheus", "grafana"])
def test_each_service_is_pinned_checked_and_restarted(name: str) -> None:
    whole = compose()
    service = whole["services"][name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    if name in PROGRAMS:
        assert service["image"] == "multigpu:local"
    else:
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    for volume in service.get("volumes", ()):
        source = volume.partition(":")[0]
        assert source in whole["volumes"] or (DEPLOY / source).exists(), source


def test_the_image_is_made_of_what_is_there() -> None:
    image = (DEPLOY / "Dockerfile").read_text("utf-8")
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    copied = [path for line in re.findall(r"^COPY (?!--from)(.+) \S+$", image, re.MULTILINE) for path in line.split()]
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert f"!{path}" in ignored, path
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+$", image, re.MULTILINE)
    # A number: of a name, Kubernetes' runAsNonRoot can't tell that it is not root.
    (uid,) = re.findall(r"useradd --uid (\d+) ", image)
    assert re.findall(r"^USER (.+)$", image, re.MULTILINE) == [uid]
    for profile in ("cpu", "cpu-torch", "cuda12", "cuda13"):
        assert (ROOT / f"tools/deploy/lock/{profile}.txt").exists()
    services = [compose()["services"][name] for name in PROGRAMS]
    mounted = {volume.partition(":")[2] for service in services for volume in service.get("volumes", ())}
    assert mounted == {str(config_of("master").data_dir), "/var/cache/multigpu"}
    assert all(folder in image for folder in mounted)
