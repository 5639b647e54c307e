"""A host of simulated GPUs with MPS, for real workers."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.mps_host import MpsHost


@pytest.fixture
async def host() -> AsyncIterator[MpsHost]:
    async with MpsHost(gpus=2) as host:
        yield host
        for worker in host.workers:
            print(f"--- log of the worker of GPU {worker.gpu}\n{worker.log}")
