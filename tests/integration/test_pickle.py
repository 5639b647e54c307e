"""Values of any class, where both the client and the worker allow pickles."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import multigpu
import pytest

from tests.fleet import Fleet

SOURCE = """
from fractions import Fraction
import multigpu

@multigpu.handler("double")
def double(number: Fraction) -> object:
    return number * 2

@multigpu.handler("pair")
def pair(number: object, times: int = 1) -> object:
    yield {number: times} if number != [1] else Fraction(1, 4)
    return Fraction(1, 3)
"""


@pytest.fixture
def pickles() -> Iterator[None]:
    multigpu.allow_pickle()
    yield
    multigpu.allow_pickle(False)


@pytest.mark.slow
@pytest.mark.usefixtures("pickles")
def test_pickles_are_read_where_both_sides_allow_it(tmp_path: Path) -> None:
    (tmp_path / "fractional.py").write_text(SOURCE)
    with Fleet(tmp_path / "fleet", workers=1, handlers=["fractional"], handlers_dir=tmp_path) as fleet:
        with fleet.client() as client:
            with pytest.raises(multigpu.TaskFailed, match=r"BadInput: .* it is a pickle, which can run any code"):
                client.run("double", Fraction(1, 2))
            with pytest.raises(multigpu.TaskFailed, match="WrongResultType: the handler gave a value of type Fraction"):
                client.run("pair", 1)
            fleet.start_worker("w1", "--allow-pickle")
            fleet.wait_for_workers("w1")
            fleet.workers["w0"].stop()
            assert client.run("double", Fraction(1, 2)) == Fraction(1)
            with client.stream("pair", Fraction(3), parameters={}) as parts:
                assert list(parts) == [{Fraction(3): 1}]
            outcome = client.run_outcome("pair", Fraction(3))
            multigpu.allow_pickle(False)
            with pytest.raises(multigpu.ResultFormatError, match=r"result of task \d+ .* multigpu\.allow_pickle\(\)"):
                outcome.value()
            (unread,) = client.map("pair", [1], return_exceptions=True)
            assert isinstance(unread, multigpu.ResultFormatError)
            with pytest.raises(multigpu.MultigpuError, match="a partial output can't be read: it is a pickle"):
                list(client.stream("pair", [1], request_id="parts"))
            with pytest.raises(multigpu.InvalidTaskError, match="this Fraction is not"):
                client.run("double", Fraction(1, 2))
        assert not fleet.faults()


@pytest.mark.usefixtures("pickles")
def test_a_value_that_cannot_be_pickled_is_rejected_before_it_is_sent() -> None:
    with multigpu.Client("127.0.0.1:1") as client, pytest.raises(multigpu.InvalidTaskError, match="can't be pickled"):
        client.submit("double", lambda: 1)
