"""What a caller is told of the client's errors."""

import pytest
from multigpu.errors import RejectedError
from multigpu_gateway.errors import http_error
from multigpu_gateway.rest.errors import rest_error


@pytest.mark.parametrize("answer", [http_error, rest_error])
def test_a_rejection_that_passes_by_itself_is_to_be_repeated(answer: type) -> None:
    stopping = answer(RejectedError(14, "the master is stopping; try again in a moment", 1.0))
    assert (stopping.status, stopping.code) == (503, "master_unavailable")
    assert dict(stopping.headers) == {b"retry-after": b"1", b"retry-after-ms": b"1000"}
    assert answer(RejectedError(7, "the token is not for the queue")).status == 403
    wrong = answer(RejectedError(2, "wrong"))
    assert (wrong.status, wrong.headers) == (400, [])
