"""`mgpuctl energy run`, `report` and `compare`: eight simulated GPUs, which the real pynvml reads, and a server that
takes their power while it answers.
"""

import csv
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from multigpu.cli import cli
from multigpu.cli.energy.run import _result_of
from multigpu.cli.failures import Failure

from tests.fakes.gpus import SimulatedGpus
from tests.worker.generate.tiny_llama import save_tiny_llama

GPUS = 8
IDLE_W, BUSY_W = 80.0, 400.0
ANSWER_S = 0.12
# The document's example, with the model, the data and the server of this test.
CONFIG = """
name: eight
backend:
  type: vllm
  device_ids: [0, 1, 2, 3, 4, 5, 6, 7]
  device_map: auto
  model: a-model
  endpoint: {endpoint}
scenario:
  dataset_name: {prompts}
  num_samples: 5
reporter:
  output_file: {folder}/results/rows.csv
output_dir: {folder}/out
"""
SHORT = ("--idle", "1", "--least", "2", "--most", "2")

Energy = Callable[..., Result]


class Server(ThreadingHTTPServer):
    """Answers as OpenAI's API, and works on all GPUs meanwhile. `fails`: every request fails."""

    daemon_threads = True

    def __init__(self, gpus: SimulatedGpus) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.gpus = gpus
        self.fails = False
        self.asked: list[dict[str, Any]] = []

    def work(self, watts: float) -> None:
        for n in range(len(self.gpus)):
            self.gpus.power(n, watts)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._head("application/json")
        self.wfile.write(json.dumps({"data": [{"id": "a-model"}]}).encode())

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if self.server.fails:
            self.send_error(503, "too busy")
            return
        self._head("text/event-stream")
        self.server.work(BUSY_W)
        time.sleep(ANSWER_S / 2)
        self._say({"choices": [{"delta": {"content": "word"}}]})
        time.sleep(ANSWER_S / 2)
        self._say({"choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": 20}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.server.work(IDLE_W)

    def _head(self, content_type: str) -> None:
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.end_headers()

    def _say(self, event: Any) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpus:
    gpus = SimulatedGpus(tmp_path / "gpus", n=GPUS)
    for name, value in gpus.env().items():
        monkeypatch.setenv(name, value)
    for n in range(GPUS):
        gpus.run_energy(n)
        gpus.power(n, IDLE_W, 700.0)
    return gpus


@pytest.fixture
def server(gpus: SimulatedGpus) -> Iterator[Server]:
    with Server(gpus) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def energy(tmp_path: Path) -> Energy:
    def run(*args: str) -> Result:
        return CliRunner().invoke(cli, ["energy", *args])

    return run


@pytest.fixture
def config(tmp_path: Path, server: Server) -> str:
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("id,text\n1,one\n2,two\n3,three\n", encoding="utf-8")
    path = tmp_path / "config.yaml"
    endpoint = f"http://127.0.0.1:{server.server_port}/v1"
    path.write_text(CONFIG.format(endpoint=endpoint, prompts=prompts, folder=tmp_path))
    return str(path)


def joules(result: dict[str, Any], name: str) -> float:
    return float(result["multigpu"][name]["joules"])


def test_eight_gpus_are_measured_while_a_server_answers(
    energy: Energy, config: str, server: Server, tmp_path: Path
) -> None:
    done = energy("run", config, *SHORT, "--html", str(tmp_path / "page.html"), "--plot", str(tmp_path / "plot.png"))
    assert done.exit_code == 0, done.output
    assert [line for line in done.stderr.splitlines() if line.startswith(("loading", "measuring", "warming"))] == [
        "loading the model", "measuring the idle devices", "warming up", "measuring",
    ]  # fmt: skip
    assert "the devices are simulated" in done.stderr
    assert {each["messages"][0]["content"] for each in server.asked} == {"one", "two", "three"}
    assert all(each["stream_options"] == {"include_usage": True} for each in server.asked)

    (path,) = (tmp_path / "out").glob("eight-*.json")
    result = json.loads(path.read_text())
    ours, summary = result["multigpu"], result["summary"]
    assert [device["name"] for device in ours["devices"]] == [f"cuda:{n}" for n in range(GPUS)] + ["cpu"]
    assert all(device["method"] == "counter" for device in ours["devices"][:GPUS])
    assert ours["idle_watts"] == pytest.approx(GPUS * IDLE_W, rel=0.15)
    # The server works nearly all the time.
    assert GPUS * IDLE_W * 2 < ours["mean_watts"] <= GPUS * BUSY_W * 1.02
    requests = summary["successful_prompts"]
    assert summary["total_completion_tokens"] == 20 * requests
    assert summary["total_prompt_tokens"] == 6 * requests
    assert ours["joules_per_request"] == pytest.approx(joules(result, "energy") / requests)
    assert joules(result, "energy_without_idle") == pytest.approx(
        joules(result, "energy") - joules(result, "idle_energy")
    )
    assert ANSWER_S / 2 <= summary["avg_time_to_first_token"] < summary["avg_latency_seconds"]

    (row,) = csv.DictReader((tmp_path / "results" / "rows.csv").open(encoding="utf-8"))
    assert row["config_device_ids"] == "0,1,2,3,4,5,6,7"
    for n in range(GPUS):
        for name in ("utilization_percent", "memory_used_mb", "memory_total_mb", "temperature_c", "power_draw_w"):
            assert float(row[f"gpu_stats_gpu_{n}_{name}"]) >= 0
    assert float(row["energy_energy_wh"]) == pytest.approx(joules(result, "energy") / 3600)
    assert row["energy_emissions_kg_co2eq"] == "", "what was not measured is empty"
    assert row["backend_info_endpoint"].endswith("/v1")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and "Simulated H200" in page and "http://" not in page.split("<svg")[0]

    shown = energy("report", str(path))
    assert shown.exit_code == 0
    assert shown.stdout.splitlines() == done.stdout.splitlines()[:-1], "all but the line with the file's name"
    assert json.loads(energy("report", str(path), "--json").stdout) == result

    again = energy("run", config, *SHORT, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["config"]["name"] == "eight"
    assert len((tmp_path / "results" / "rows.csv").read_text().splitlines()) == 3, "a header and two rows"


def test_a_request_that_fails_ends_the_benchmark_with_its_error(energy: Energy, config: str, server: Server) -> None:
    server.fails = True
    done = energy("run", config, *SHORT)
    assert done.exit_code == 1
    assert "3 requests have failed one after the other; the last: 503" in done.stderr


# In place of the process of the benchmark. It is killed if it can't write.
TALKATIVE = """#!{python}
import json, signal, sys
signal.alarm(10)
print("a warning of a library\\n" * 50_000, file=sys.stderr, flush=True)
print(json.dumps({{"phase": "load", "done": 0, "of": 0}}), flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["print(json.dumps({'answer': 1}))", "sys.exit('the reason')"])
def test_a_benchmark_may_write_any_amount_to_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    script = tmp_path / "benchmark"
    script.write_text(TALKATIVE.format(python=sys.executable, end=end), encoding="utf-8")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    if "answer" in end:
        assert _result_of([]) == {"answer": 1}
    else:
        with pytest.raises(Failure) as failed:
            _result_of([])
        assert str(failed.value) == "the reason"


@pytest.mark.parametrize(
    ("setting", "code", "says"),
    [
        ("backend.device_ids=[0,8]", 1, "not all GPUs are available: cuda:8: "),
        ("backend.model=another", 1, "has no model another; it has a-model"),
        ("backend.endpoint=http://127.0.0.1:1/v1", 1, "can't be asked for its models"),
        ("scenario.dataset_name=org/data", 1, "pip install datasets"),
        ("scenario.text_column_name=body", 1, "can't be read: KeyError('body')"),
        ("backend.color=red", 2, "color"),
        ("backend", 2, "not of the form KEY=VALUE"),
        ("name.first=x", 2, "name has no keys"),
    ],
)
def test_a_setting_that_is_wrong_is_named(energy: Energy, config: str, setting: str, code: int, says: str) -> None:
    done = energy("run", config, *SHORT, "--set", setting)
    assert says in " ".join(done.stderr.split())
    assert done.exit_code == code


def test_a_csv_file_with_other_columns_is_not_touched(energy: Energy, config: str, tmp_path: Path) -> None:
    rows = tmp_path / "results" / "rows.csv"
    rows.parent.mkdir()
    rows.write_text("a,b\n1,2\n")
    done = energy("run", config, *SHORT)
    assert done.exit_code == 1
    assert "has other columns: name another file" in done.stderr
    assert rows.read_text() == "a,b\n1,2\n"


def result_of(path: Path, joules_per_request: Sequence[float | None]) -> str:
    blocks = [{"joules": each and 10 * each, "requests": 10, "completion_tokens": 100} for each in joules_per_request]
    path.write_text(json.dumps({"config": {"name": path.stem}, "multigpu": {"blocks": blocks}}))
    return str(path)


def test_compare_fails_if_the_second_takes_significantly_more(energy: Energy, tmp_path: Path) -> None:
    before = result_of(tmp_path / "before.json", [10.0, 10.2, 9.9, 10.1, 10.0, 9.8])
    same = result_of(tmp_path / "same.json", [10.1, 9.9, 10.2, 9.8, 10.0, 10.1])
    more = result_of(tmp_path / "more.json", [10.9, 11.1, 11.0, 10.8, 11.2, 11.0])
    assert energy("compare", before, same).exit_code == 0
    worse = energy("compare", before, more)
    assert worse.exit_code == 1
    assert "+10.0%" in worse.stdout
    tolerated = energy("compare", before, more, "--tolerate", "15")
    assert tolerated.exit_code == 0
    assert "more, tolerated" in tolerated.stdout
    better = energy("compare", more, before, "--json")
    assert better.exit_code == 0
    (request, token) = json.loads(better.stdout)
    assert request["significant"] and not request["worse"] and request["change"] == pytest.approx(-1 / 11)
    assert token["before_joules"] == pytest.approx(request["before_joules"] / 10)


def test_compare_says_what_is_no_result(energy: Energy, tmp_path: Path) -> None:
    before = result_of(tmp_path / "before.json", [10.0, 10.1])
    short = result_of(tmp_path / "short.json", [10.0])
    unmeasured = result_of(tmp_path / "unmeasured.json", [None, None])
    other = tmp_path / "other.json"
    other.write_text("[]")
    for path, says in (
        (short, f"{short}: energy was measured in 1 blocks"),
        (unmeasured, f"{unmeasured}: energy was not measured"),
        (str(other), "not a result"),
        ("none", "can't read"),
    ):
        done = energy("compare", before, path)
        assert done.exit_code == 2
        assert says in done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--html", "{folder}/config.yaml/page.html"), "config.yaml is not writable"),
        (("--plot", "{folder}"), "is a folder"),
        (("--set", "reporter.output_file={folder}/config.yaml/rows.csv"), "config.yaml is not writable"),
        (("--set", "output_dir={folder}/config.yaml"), "config.yaml is not writable"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_the_run(
    energy: Energy, config: str, server: Server, tmp_path: Path, args: tuple[str, str], says: str
) -> None:
    done = energy("run", config, *SHORT, args[0], args[1].format(folder=tmp_path))
    assert (done.exit_code, server.asked) == (2, [])
    assert says in done.stderr


def test_devices_without_sensors_are_drawn_without_warnings(
    energy: Energy, config: str, gpus: SimulatedGpus, tmp_path: Path
) -> None:
    for n in range(GPUS):
        gpus.fail("nvmlDeviceGetPowerUsage", n)
        gpus.fail("nvmlDeviceGetTotalEnergyConsumption", n)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # the collector may close what earlier tests left open
        done = energy("run", config, *SHORT, "--plot", str(tmp_path / "plot.png"))
    assert done.exit_code == 0, done.output
    assert "energy was not measured" in done.stderr
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_model_of_transformers_runs_on_the_cpu(energy: Energy, tmp_path: Path) -> None:
    """The document's example as it is, but for the model, the data and the device."""
    save_tiny_llama(tmp_path / "llama")
    (tmp_path / "prompts.txt").write_text("One.\nTwo words.\n\nAnd three words.\n")
    path = tmp_path / "config.yaml"
    path.write_text(
        "backend:\n  type: pytorch\n  device_ids: [0, 1, 2, 3]\n  device_map: auto\n"
        '  max_memory: {0: "20GB", 1: "20GB", 2: "20GB", 3: "20GB"}\n'
    )
    settings = {
        "backend.device": "cpu", "backend.model": tmp_path / "llama", "output_dir": tmp_path / "out",
        "scenario.dataset_name": tmp_path / "prompts.txt", "scenario.input_shapes.batch_size": 2,
        "scenario.generate_kwargs": "{max_new_tokens: 12, min_new_tokens: 12}",
        "reporter.output_file": tmp_path / "rows.csv",
    }  # fmt: skip
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = energy("run", str(path), *SHORT, "--json", *overrides)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    summary = result["summary"]
    assert summary["failed_prompts"] == 0
    assert summary["total_completion_tokens"] == 12 * summary["total_prompts"]
    assert summary["total_prompt_tokens"] > summary["total_prompts"]
    assert 0 < summary["avg_time_to_first_token"] < summary["avg_latency_seconds"]
    assert result["backend_info"]["device"] == "cpu"
    assert [device["name"] for device in result["multigpu"]["devices"]] == ["cpu"]
    assert result["gpu_stats"] == {}
