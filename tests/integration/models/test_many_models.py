"""Models of a whole fleet: twenty on two workers with room for five each, which is the short form of `python -m
benchmarks.engines.models`; and versions that tasks name while they change.
"""

from pathlib import Path

import pytest
from multigpu import Client, MultigpuError, UnplaceableError
from multigpu.v1 import admin_service_pb2, task_pb2
from multigpu_worker.models.messages import LEFT_OUT

from benchmarks.engines.models import MODELS, drive, judge
from tests.fleet import QUICK, Fleet, until
from tests.worker.toy_models import Answer, Shop


@pytest.mark.slow
def test_twenty_models_share_the_room_of_ten(tmp_path: Path) -> None:
    run, asked, room = drive(tmp_path, 2.5, 3, 0.1)
    judge(run, asked, room, first_loads=MODELS)  # of the second worker
    assert len({model for _, model in run.loads}) > 10, "more than there is room for at once"


@pytest.mark.slow
def test_a_task_that_names_a_version_gets_it_until_its_successor_is_ready(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "models")
    hang = shop.sign("m:2", "hang")
    hang.touch()
    shop.add("m", "1", words="old")
    with (
        Fleet(tmp_path / "fleet", workers=1, master_flags=QUICK, worker_flags=shop.flags) as fleet,
        Client(fleet.address) as client,
    ):

        def ask(model: str) -> str:
            return Answer.of(bytes(client.run("infer", b"x", model=model))).words

        def resident() -> set[str]:
            return {each.model for worker in fleet.list_workers() for each in worker.models}

        def rejected() -> str:
            try:
                ask("m:1")
            except MultigpuError as error:
                return str(error)
            return ""

        assert ask("m:1") == "old"
        shop.add("m", "2", words="new")
        until(lambda: "m:2" in resident(), what="the successor's loading")
        assert (ask("m:1"), ask("m")) == ("old", "old")
        hang.unlink()
        until(lambda: ask("m") == "new", what="the successor")
        assert "m:2" in until(rejected, what="the end of the old version")
        until(lambda: resident() == {"m:2"}, what="its memory")
        with pytest.raises(MultigpuError, match=r"no worker has model 'm:1'.*m:2"):
            ask("m:1")


def test_a_master_without_workers_queues_tasks_and_a_worker_that_comes_runs_them(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", workers=0, master_flags=QUICK) as fleet:
        (task_id,) = fleet.submit("echo", b"early")
        assert fleet.get(task_id).state == task_pb2.TASK_STATE_QUEUED
        fleet.restart_master()
        fleet.start_worker("w0")
        assert fleet.outcome(task_id).result == b"early"


def test_a_task_for_a_model_that_is_broken_is_rejected_with_the_reason(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "models")
    shop.add("m", "1")
    (shop.add("broken") / "model.toml").write_text("engin = 'toy_engine:Toy'\n")
    with Fleet(tmp_path / "fleet", workers=1, master_flags=QUICK, worker_flags=shop.flags) as fleet:
        fleet.wait_for_workers()
        with (
            fleet.client() as client,
            pytest.raises(UnplaceableError, match=r"'broken' can't be loaded on w0: .*engin"),
        ):
            client.run("infer", b"x", model="broken")


def test_models_that_a_worker_cannot_report_are_counted_in_its_log_and_by_the_master(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "models")
    shop.add("served")
    for number in range(500):
        (shop.folder / f"empty-{number:0180}").mkdir()
    with Fleet(tmp_path / "fleet", workers=1, worker_flags=shop.flags) as fleet:
        (warning,) = fleet.workers["w0"].events("some models are left out")
        request = admin_service_pb2.ListModelsRequest(page_size=1000)
        entries = fleet.admin.ListModels(request, timeout=20).models
        (left_out,) = [entry for entry in entries if entry.model.name == LEFT_OUT]
        assert (left_out.model.error, left_out.worker_ids) == (warning["reason"], ["w0"])
        folders = {entry.model.name for entry in entries if entry.model.name.startswith("empty-")}
        assert warning["reason"].startswith(f"{500 - len(folders)} models are not offered")
        with fleet.client() as client:
            assert Answer.of(bytes(client.run("infer", b"x", model="served"))).words == "I am served"
