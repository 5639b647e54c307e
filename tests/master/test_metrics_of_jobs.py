"""Prometheus metrics of training jobs."""

import json
from dataclasses import replace

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.workers.info import Capability, WorkerInfo
from multigpu_master.metrics.jobs import EVENTS_READ, job_metrics, last_report, running_jobs

from tests.core.stage import SPEC, Stage, lease_of

JSON = "application/json"
LOSS = {"metrics": {"loss": 2.5, "norm": "nan"}, "step": 7}


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    for name in ("a", "b", "c"):
        kinds = (Capability(kind="train"), Capability(kind="run"))
        stage.join(WorkerInfo(worker_id=name, capabilities=kinds, store_address=f"{name}:1", memory_total_bytes=100))
    return stage


def test_a_running_job_has_its_last_report(stage: Stage) -> None:
    stage.submit(spec=SPEC)
    (job,) = stage.submit(spec=replace(SPEC, kind="train", world_size=2), request="night")
    lease = lease_of(job)
    lease.fraction = 0.25
    parts = [
        {"job": {}},
        {"metrics": {"loss": 9.0}, "step": 6},
        {"metrics": {"rate": 0.5}, "step": 7},
        LOSS,
        {"checkpoint": {"step": 5}},
    ]
    partials = [ev.PartialOutput(lease.lease_id, i, json.dumps(part).encode(), JSON) for i, part in enumerate(parts)]
    stage.handle(ev.Partials(lease.worker.session, partials))
    found = {
        (metric.name, *each.labels.values()): each.value
        for metric in job_metrics(running_jobs(stage.core.fleet.workers.values()))
        for each in metric.samples
    }
    assert found == {
        ("mgpu_job_fraction_done", "night"): 0.25,
        ("mgpu_job_ranks", "night"): 2,
        ("mgpu_job_metric", "night", "loss"): 2.5,
        ("mgpu_job_metric", "night", "rate"): 0.5,
        ("mgpu_job_metric", "night", "step"): 7,
    }


def test_what_is_no_report_is_passed_over(stage: Stage) -> None:
    (job,) = stage.submit(spec=replace(SPEC, kind="train"))
    assert last_report(job) == {}
    partials = job.ensure_extra().partials
    partials += [json.dumps(LOSS).encode(), b"\xff", b"[]", b'{"metrics": 1, "step": 3}']
    assert last_report(job) == {"loss": 2.5, "step": 7.0}
    partials += [b"[" * 100_000, b'{"metrics": {"loss": 1.5}, "step": 1%s}' % (b"0" * 400)]
    assert last_report(job) == {"loss": 1.5}, "no float holds the step"
    partials += [b'{"metrics": {"loss\\ud800": 1.5}, "step": 2}']
    assert last_report(job) == {"loss?": 1.5, "step": 2.0}, "no other text can be exported"
    partials += [b"{}"] * EVENTS_READ
    assert last_report(job) == {}
