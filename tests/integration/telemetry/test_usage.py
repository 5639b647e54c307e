"""Device time of tasks, summed over a period: by queue, token, kind and model."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click.testing
import multigpu
import pytest
from multigpu.cli import cli
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2

from tests.fleet import Fleet
from tests.security.secured import SecuredFleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, workers=0) as running:
        running.start_worker("w0", "--slots", "2")
        running.wait_for_workers()
        yield running


def test_usage_is_summed_by_what_a_task_is_and_survives_the_master(fleet: Fleet) -> None:
    begun = datetime.now(UTC)
    with fleet.client() as client, multigpu.AdminClient(fleet.address) as admin:
        list(client.map("sleep", [b"0.4"] * 4, queue="day"))
        outcomes = [client.submit("sleep", b"0.1", queue="night").outcome(), client.submit("echo", b"x").outcome()]
        with pytest.raises(multigpu.TaskFailed):
            client.run("fail", b"", attempts_max=1)
        assert all(outcome.energy is None for outcome in outcomes), "a CPU's energy can't be shared"

        def sums(*by: str) -> dict[tuple[str, ...], multigpu.fleet.Usage]:
            found = admin.usage(by, begin=begun).usage
            return {tuple(getattr(each, name) for name in by): each for each in found}

        by_queue = sums("queue")
        assert {name: (each.tasks_succeeded, each.attempts_failed) for (name,), each in by_queue.items()} == {
            "day": (4, 0), "night": (1, 0), "default": (1, 1),
        }  # fmt: skip
        # Two ran at a time: each counts for half of the time.
        assert by_queue["day",].device_duration_s == pytest.approx(0.8, abs=0.35)
        assert by_queue["night",].device_duration_s == pytest.approx(0.1, abs=0.09)
        assert all(not each.measured_duration_s and not each.energy_joules for each in by_queue.values())
        by_both = list(sums("kind", "queue"))
        assert by_both[:2] == [("sleep", "day"), ("sleep", "night")], "the largest device time first"
        assert sorted(by_both[2:]) == [("echo", "default"), ("fail", "default")]
        (everything,) = sums().values()
        assert (everything.tasks_succeeded, everything.queue) == (6, "")
        before = admin.usage(begin=begun - timedelta(days=9), end=begun - timedelta(days=8))
        assert not before.usage and before.begin_time is not None and before.begin_time.minute % 10 == 0
        with pytest.raises(multigpu.InvalidRequestError, match="ends before it begins"):
            admin.usage(begin=begun, end=begun - timedelta(days=1))

        fleet.restart_master()
        assert sums("queue") == by_queue


def test_the_submitter_is_the_token_and_sees_its_queues(tmp_path: Path) -> None:
    with SecuredFleet(tmp_path) as secured:
        secured.start_worker("w0")
        token = secured.create("team-a", "submit", queues=["a"])[1]
        own, other = secured.caller(token), secured.as_role("submit")
        for caller, queue in ((own, "a"), (other, "b")):
            # A client can't name another submitter.
            spec = task_pb2.TaskSpec(kind="echo", queue=queue, submitter="nobody")
            inputs = [task_pb2.TaskInput(payload=b"x")]
            submit = task_service_pb2.SubmitRequest(batches=[task_pb2.TaskBatch(spec=spec, inputs=inputs)])
            (result,) = caller.call("TaskService/Submit", submit).results
            get = task_service_pb2.GetRequest(task_id=result.task_id)
            get.wait.FromSeconds(20)
            assert caller.call("TaskService/Get", get).task.outcome.result == b"x"
        request = admin_pb.GetUsageRequest(group_by=[admin_pb.USAGE_KEY_SUBMITTER, admin_pb.USAGE_KEY_QUEUE])
        names = {(each.submitter, each.queue) for each in secured.admin.call("AdminService/GetUsage", request).usage}
        assert names == {("team-a", "a"), ("submit", "b")}
        (seen,) = own.call("AdminService/GetUsage", request).usage
        assert (seen.submitter, seen.tasks_succeeded) == ("team-a", 1)


def test_mgpuctl_energy_usage(fleet: Fleet) -> None:
    def run(*words: str) -> click.testing.Result:
        return click.testing.CliRunner().invoke(cli, ["--master", fleet.address, "energy", "usage", *words])

    assert run().stderr == "no task has used a device in this period\n"
    with fleet.client() as client:
        client.run("sleep", b"0.2", queue="night")
    lines = run("--by", "queue,kind").stdout.splitlines()
    assert lines[0].split() == ["QUEUE", "KIND", "TASKS", "FAILED", "DEVICE", "TIME", "MEASURED", "ENERGY", "A", "TASK"]
    assert lines[1].split()[:4] == ["night", "sleep", "1", "0"]
    assert lines[1].split()[-3:] == ["0%", "-", "-"]
    report = json.loads(run("--json", "--since", "5400s", "--until", "2099-01-01").stdout)
    assert report["usage"][0]["queue"] == "night"
    assert report["usage"][0]["device_duration"] >= 0.2
    for wrong, says in (("--by=price", "can't be summed by 'price'"), ("--since=soon", "'soon' is no time")):
        result = run(wrong)
        assert result.exit_code == 2
        assert says in " ".join(result.stderr.split())
