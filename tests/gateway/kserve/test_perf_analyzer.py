"""NVIDIA's perf_analyzer, unchanged, gets its table from a gateway: see benchmarks/perf_analyzer."""

import os
from collections.abc import Iterator

import pytest

from benchmarks.perf_analyzer.cases import CASES, Bench
from tests.fleet import Fleet
from tests.gateway.conftest import GatewayProcess

BINARY = os.environ.get("PERF_ANALYZER", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BINARY, reason="the environment variable PERF_ANALYZER names no perf_analyzer"),
]
WINDOW_S = 0.5


@pytest.fixture(scope="module")
def bench(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("perf_analyzer")
    with GatewayProcess(folder, fleet.address, "--kserve-shared-memory") as gateway:
        found = Bench(BINARY, gateway.address, gateway.grpc, folder)
        found.load()
        yield found


@pytest.mark.parametrize("case", CASES)
def test_a_case_gets_its_table(bench: Bench, case: str) -> None:
    rows = bench.run(case, WINDOW_S)
    assert len(rows) >= 2
    assert all(row.rate > 0 and 0 < row.p50 <= row.p95 for row in rows)
