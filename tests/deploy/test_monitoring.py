"""The dashboard and the alerts of deploy/: promtool accepts them, and a real Prometheus finds what they ask for."""

import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from multigpu.v1 import admin_service_pb2 as admin_pb

from tests.deploy.deployment import ROOT
from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess

DEPLOY = ROOT / "deploy"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="not installed: apt-get install prometheus")

PANELS = {"bargauge", "heatmap", "row", "stat", "state-timeline", "table", "timeseries"}
# The fleet of these tests has no TLS.
WITHOUT_SERIES = {"mgpu_certificate_expiry_timestamp_seconds"}
VARIABLES = {"$__rate_interval": "10s", "$host": ".*", "$worker": ".+", "$kind": ".+"}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/multigpu.json").read_text("utf-8"))
    return found


def queries() -> set[str]:
    """The panels' queries, with values for the variables."""
    found = {target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())}
    for name, value in VARIABLES.items():
        found = {query.replace(name, value) for query in found}
    return found


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def selectors(query: str) -> set[str]:
    """The parts of a query that name series."""
    return set(re.findall(r"\b(?:mgpu_\w+|up)\b(?:\{[^}]*\})?", query))


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_promtool_accepts_the_configuration() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_the_alerts_fire_when_they_should_and_not_before() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_each_alert_says_what_to_do() -> None:
    names = [alert["alert"] for alert in alerts()]
    assert len(names) == len(set(names))
    page = (ROOT / "docs/monitoring.md").read_text("utf-8")
    for alert in alerts():
        name, annotations = alert["alert"], alert["annotations"]
        assert alert["for"], name
        assert alert["labels"]["severity"] in {"critical", "warning"}, name
        assert "mgpuctl " in annotations["description"], name
        if "worker_id" in "".join(selectors(alert["expr"])) or "mgpu_device_" in alert["expr"]:
            assert "$labels.worker_id" in annotations["summary"] + annotations["description"], name
        assert f"| `{name}` | {alert['labels']['severity']} |" in page, name


def test_the_dashboard_has_current_panels_that_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert {panel["type"] for panel in panels} == PANELS
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}, panel["title"]


class Prometheus:
    """A Prometheus on a port that the kernel picks, with the configuration of deploy/ for other targets."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        assert PROMETHEUS is not None
        config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / "prometheus/alerts.yml")]
        jobs = {job["job_name"]: job for job in config["scrape_configs"]}
        assert jobs.keys() == targets.keys()
        for name, address in targets.items():
            jobs[name]["static_configs"] = [{"targets": [address]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = folder / "prometheus.log"
        argv = [
            PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            "--web.listen-address=127.0.0.1:0", "--log.format=json",
        ]  # fmt: skip
        if (setpriv := shutil.which("setpriv")) is not None:  # the kernel ends it with this process
            argv = [setpriv, "--pdeathsig", "KILL", *argv]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._address = until(self._ready, what="Prometheus")
        except BaseException:
            self.close()
            raise

    def _ready(self) -> str:
        """Its address, from its log; "": it does not answer queries yet."""
        text = self._log.read_text("utf-8")
        assert self._process.poll() is None, text
        if "Server is ready to receive web requests." not in text:
            return ""
        (line,) = [line for line in text.splitlines() if '"Listening on"' in line]
        return str(json.loads(line)["address"])

    def get(self, path: str, **parameters: str) -> Any:
        """The data that its API answers. AssertionError: it answers an error."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, query: str) -> list[Any]:
        """The series that a query selects now."""
        found: list[Any] = self.get("query", query=query)["result"]
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait(120)


def set_sensors(gpus: SimulatedGpus) -> None:
    gpus.use(0, 0.6, 0.2)
    gpus.use_memory(0, 4 << 30)
    gpus.heat(0, 71)
    gpus.power(0, 412.5, 650.0)
    gpus.clocks(0, 1755, 3201)
    gpus.throttle(0, 0x24)
    gpus.set_energy(0, 123_456.0)
    gpus.pcie(0, sent_kib=2048, received_kib=512)
    gpus.ecc(0, corrected=7)
    gpus.remap(0, correctable=2, pending=False, failed=False)
    gpus.nvlink(0, 0, up=True)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It scrapes the master of two workers that share a simulated GPU and of one on the CPU, and a gateway."""
    folder = tmp_path_factory.mktemp("monitoring")
    gpus = SimulatedGpus(folder / "gpus", n=1)
    set_sensors(gpus)
    master_flags, worker_flags = ["--metrics-listen", "127.0.0.1:0"], ["--embedding-cache-entries", "100"]
    with Fleet(
        folder / "fleet", workers=0, env=gpus.env(), master_flags=master_flags, worker_flags=worker_flags
    ) as fleet:
        for name in ("gpu", "neighbour"):
            fleet.start_worker(name, "--device", "cuda:0", "--device-workers", "2")
        fleet.start_worker("cpu")
        fleet.wait_for_workers()
        fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="paused"), timeout=20)
        metrics = fleet.master.events("metrics are served")[0]["address"]
        with GatewayProcess(folder, fleet.address, "--request-timeout-s", "1") as gateway, fleet.client() as client:
            running = Prometheus(folder, {"multigpu-master": metrics, "multigpu-gateway": gateway.address})
            try:
                client.submit("echo", b"it waits", queue="paused")
                until(lambda: running.query('up{job="multigpu-gateway"} == 1'), what="a scrape")
                request = {"model": "all-MiniLM-L6-v2", "input": "it waits too"}
                answer, _ = gateway.call("POST", "/v1/embeddings", request, {"X-Multigpu-Queue": "paused"})
                assert answer.status == 504
                client.embed(["a text"])
                yield running
            finally:
                running.close()
        assert not fleet.faults()


def without_series(prometheus: Prometheus, wanted: set[str]) -> set[str]:
    """The queries that select nothing within half a minute."""
    missing = set(wanted)

    def complete() -> bool:
        missing.difference_update([query for query in missing if prometheus.query(query)])
        return not missing

    with contextlib.suppress(AssertionError):
        until(complete, 30.0)
    return missing


@needs_prometheus
@pytest.mark.slow
def test_each_query_of_the_dashboard_finds_series(prometheus: Prometheus) -> None:
    for query in queries():
        prometheus.query(query)  # it is valid
    wanted = {query for query in queries() if selectors(query).isdisjoint(WITHOUT_SERIES)}
    assert without_series(prometheus, wanted) == set()
    # Workers that share a device are one line there.
    (used,) = [query for query in queries() if "mgpu_device_memory_used_bytes" in query and '!="cpu"' in query]
    until(lambda: len(prometheus.query("mgpu_device_power_watts")) == 2, what="the values of both workers")
    assert [found["metric"]["name"] for found in prometheus.query(used)] == ["cuda:0"]


@needs_prometheus
@pytest.mark.slow
def test_each_series_of_an_alert_exists(prometheus: Prometheus) -> None:
    def evaluated() -> dict[str, str]:
        rules = {rule["name"]: rule["health"] for group in prometheus.get("rules")["groups"] for rule in group["rules"]}
        return {} if "unknown" in rules.values() else rules

    assert until(evaluated, what="all alerts") == {alert["alert"]: "ok" for alert in alerts()}
    wanted = {selector for alert in alerts() for selector in selectors(alert["expr"])}
    assert without_series(prometheus, wanted - WITHOUT_SERIES) == set()
