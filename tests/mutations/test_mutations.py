"""Every listed mutation fits the product, and a short set is tried: one of each kind of rule, by each checker."""

import subprocess
import sys
from itertools import chain

import pytest

from tests.commands import run_module
from tests.mutations.listed import MUTATIONS
from tests.mutations.mutation import ROOT, Mutation
from tests.mutations.rules.pytest_checkers import TESTS, TESTS_OF

# Noticed within a few seeds each, so that all of them together take less than a minute.
SHORT = (
    "timers never fire",
    "P5: duplicate request_id taken twice",
    "P2: the old session of a worker lives on beside the new one",
    "P6: leases are taken before the deadline of the drain",
    "P2: a result counts whoever holds the lease",
    "P4: a task has one attempt more than it may",
    "P2: lease_ids are given twice",
    "P10: full windows get leases",
    "P1: acceptance before fsync",
    "dropped leases are run",
    "P1: a commit is acknowledged before it is made",
    "sent reports are not kept until they are acknowledged",
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m.breaks for m in MUTATIONS])
def test_each_mutation_fits_the_product(mutation: Mutation) -> None:
    assert mutation.found() == 1, f"the text of {mutation.breaks!r} occurs {mutation.found()} times in {mutation.path}"
    compile(mutation.mutated(), str(mutation.path), "exec")


NAMED = dict.fromkeys(m.checker for m in MUTATIONS if "::" in m.checker)


@pytest.mark.parametrize("test", [*chain(*TESTS_OF.values()), *NAMED])
def test_the_tests_that_serve_as_checkers_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert (TESTS / path).exists()
    assert not name or f"def {name}(" in (TESTS / path).read_text("utf-8")


ONLY = [argument for name in SHORT for argument in ("--only", name)]


@pytest.mark.slow
def test_the_short_set_is_noticed() -> None:
    done = run_module("tests.mutations", *ONLY, "--baseline", "20", "--processes", "2")
    assert done.returncode == 0, done.stdout
    assert f"{len(SHORT)} mutations, {len(SHORT)} noticed" in done.stdout


def test_an_unnoticed_mutation_fails_the_run() -> None:
    command = [sys.executable, "-m", "tests.mutations", "--only", "priority ignored", "--seeds", "0", "--baseline", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1
    assert "priority ignored survives 0 seeds" in done.stdout
