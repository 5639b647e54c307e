"""Fixtures of the command line's tests: a scripted master, and commands run against it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from multigpu.cli import cli

from tests.client.cli.unary_master import UnaryMaster, unary_master

Run = Callable[..., Result]


@pytest.fixture
def master() -> Iterator[UnaryMaster]:
    with unary_master() as script:
        yield script


@pytest.fixture
def run(master: UnaryMaster) -> Run:
    def run(*args: str, **kwargs: Any) -> Result:
        return CliRunner().invoke(cli, args, env={"MGPU_MASTER": master.address}, **kwargs)

    return run
