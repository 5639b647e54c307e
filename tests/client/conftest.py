"""A scripted master, and a client of each sort."""

from collections.abc import AsyncIterator

import pytest
from multigpu import AsyncClient

from tests.client.scripted_master import ScriptedMaster


@pytest.fixture(name="master")
async def master_fixture() -> AsyncIterator[ScriptedMaster]:
    async with ScriptedMaster() as master:
        yield master


@pytest.fixture(name="client")
async def client_fixture(master: ScriptedMaster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(master.address) as client:
        yield client
