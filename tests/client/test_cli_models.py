"""mgpuctl models against a real fleet with small models: what it shows, and what loading and unloading by hand do."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from multigpu.cli import cli

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
    assert run("unload", "broken").exit_code == 0


def test_mistakes_are_told_with_what_there_is(run: Run) -> None:
    for command in ("show", "load", "unload"):
        unknown = run(command, "nothing")
        assert unknown.exit_code != 0
        assert "nothing" in unknown.stderr
    nowhere = run("load", "small", "--worker", "elsewhere")
    assert nowhere.exit_code != 0
    assert "elsewhere" in nowhere.stderr
