"""The history of jobs that fine-tune, before a master without workers."""

import json
from typing import Any

import pytest
from multigpu import NotFoundError
from multigpu._kinds.training import KIND
from multigpu_gateway.clients import ClientPair
from multigpu_gateway.rest import training

from tests.fleet import Fleet
from tests.gateway.test_events import Caller

FLEET = {"workers": 0}


async def test_the_history_leaves_out_tasks_that_are_forgotten_while_it_is_made(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ClientPair({"master": fleet.address}, "")
    client = pair.client
    for job in ("known", "forgotten"):
        await client.submit(KIND, b"", request_id=job, wait_for_worker=True)
    get = client.get

    async def get_known(task: Any, **options: Any) -> Any:
        found = await get(task, **options)
        if found.request_id == "forgotten":
            raise NotFoundError("no such task")
        return found

    monkeypatch.setattr(client, "get", get_known)
    caller = Caller()
    await training.history(caller.request, pair)
    assert [each["job"] for each in json.loads(caller.body)["jobs"]] == ["known"]
    await pair.close()
