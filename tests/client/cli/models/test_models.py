"""mgpuctl models against a real fleet with small models: what it shows, and what loading and unloading by hand do."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import pytest
from click.testing import CliRunner, Result
from multigpu.cli import cli, tables

from tests.client.cli.fleet_up import MGPUCTL
from tests.fleet import Fleet, until
from tests.worker.toy_models import Shop

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("models")
    shop = Shop(folder / "shop")
    shop.add("small", load_s=0.1)
    shop.add("versioned", "1")
    shop.add("versioned", "2")
    for version in ("1", "2"):
        toml = shop.add("both", version).parent / "model.toml"
    toml.write_text(f'versions = "all"\n{toml.read_text()}')
    shop.add("broken")
    shop.sign("broken", "error").write_text("its weights are from another world")
    with Fleet(folder / "fleet", workers=1, worker_flags=shop.flags) as fleet:
        yield fleet


@pytest.fixture
def run(fleet: Fleet) -> Run:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["models", *arguments, "--master", fleet.address])

    return call


def entry(run: Run, model: str) -> dict[str, Any]:
    (found,) = json.loads(run("show", model, "--json").stdout)
    assert isinstance(found, dict)
    return found


def test_models_are_listed_whether_loaded_or_not(run: Run) -> None:
    listed = run("list")
    assert listed.exit_code == 0, listed.output
    assert "small" in listed.stdout
    assert "versioned:2 (current)" in listed.stdout
    models = [e["model"] for e in json.loads(run("list", "--json").stdout)]
    assert {"small", "broken"} <= {m["name"] for m in models}


def test_what_is_loaded_stays_until_it_is_unloaded_and_survives_the_master(run: Run, fleet: Fleet) -> None:
    loaded = run("load", "small", "--wait")
    assert loaded.exit_code == 0, loaded.output
    assert "small is loaded on w0" in loaded.stdout
    (place,) = entry(run, "small")["places"]
    assert (place["worker_id"], place["residency"]["state"], place["residency"]["pinned"]) == ("w0", "READY", True)
    shown = run("show", "small").stdout
    assert "pinned" in shown.lower()
    assert "w0" in shown
    fleet.restart_master()
    fleet.wait_for_workers("w0")
    until(lambda: entry(run, "small")["places"], what="the worker's word")
    assert next(iter(fleet.worker("w0").models)).pinned
    gone = run("unload", "small", "--wait")
    assert gone.exit_code == 0, gone.output
    assert entry(run, "small")["places"] == []
    assert "loaded nowhere" in run("unload", "small").stdout


def test_a_model_that_cannot_be_loaded_says_why(run: Run) -> None:
    failed = run("load", "broken", "--wait", "--timeout", "30")
    assert failed.exit_code == 1
    assert "another world" in failed.stderr
    assert "the worker retries until `mgpuctl models unload broken`" in failed.stderr
    assert run("unload", "broken").exit_code == 0


def test_unknown_names_are_reported(run: Run) -> None:
    for command in ("show", "load", "unload"):
        unknown = run(command, "nothing")
        assert unknown.exit_code != 0
        assert "nothing" in unknown.stderr
    nowhere = run("load", "small", "--worker", "elsewhere")
    assert nowhere.exit_code != 0
    assert "elsewhere" in nowhere.stderr


def test_loading_a_name_waits_for_its_current_version_and_not_for_another(run: Run) -> None:
    """The older one is ready, and that says nothing of the one that was asked for."""
    assert run("load", "both:1", "--wait").exit_code == 0
    loaded = run("load", "both", "--wait", "--json")
    assert loaded.exit_code == 0, loaded.output
    places = {e["model"]["version"]: e["places"] for e in json.loads(loaded.stdout)["models"]}
    assert [place["residency"]["state"] for place in places["2"]] == ["READY"]
    assert run("unload", "both", "--wait").exit_code == 0
    entries = json.loads(run("show", "both", "--json").stdout)
    assert [e["places"] for e in entries] == [[], []]


@pytest.mark.parametrize("command", ["show", "load", "unload"])
def test_the_nearest_name_is_suggested(run: Run, command: str) -> None:
    unknown = run(command, "smal")
    assert unknown.exit_code == 4
    assert "no worker offers model 'smal', did you mean 'small'? there are: " in unknown.stderr


def test_a_time_that_is_no_number_is_rejected(run: Run) -> None:
    rejected = run("load", "small", "--wait", "--timeout", "nan")
    assert rejected.exit_code == 2
    assert "'nan' is not a number" in rejected.stderr


@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.parametrize(("stdout", "words"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descr")])
def test_an_answer_that_can_not_be_written_is_an_error(
    fleet: Fleet, flags: tuple[str, ...], stdout: str, words: str
) -> None:
    argv = ["sh", "-c", f'exec "$@" {stdout}', "sh", *MGPUCTL, "models", "list", *flags]
    env = {**os.environ, "MGPU_MASTER": fleet.address}
    done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, check=False, timeout=400, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith(f"mgpuctl: can't write: {words}")
    assert "Traceback" not in done.stderr


def test_a_narrow_terminal_gets_fewer_columns_and_not_cut_ones() -> None:
    names, rows = ("NAME", "A", "B", "PLACE"), [("x" * 30, "1234", "-", "w0"), ("y", "5678", "", "w1")]
    columns = [tables.Column(name, itemgetter(n), rank=(0, 2, 1, 0)[n]) for n, name in enumerate(names)]

    def names_at(width: int) -> list[str]:
        return [column.name for column in tables.fit(rows, columns, width)]

    assert names_at(28) == ["NAME", "A", "B", "PLACE"]
    # B has no information, and goes before A. The name is folded.
    assert names_at(27) == ["NAME", "A", "PLACE"]
    # The others stay, whatever the width.
    assert names_at(22) == names_at(5) == ["NAME", "PLACE"]
    drawn = tables.rendered(tables.grid(tables.fit(rows, columns, 22)), 22)
    assert [line.split()[-1] for line in drawn if "w" in line] == ["w0", "w1"]
