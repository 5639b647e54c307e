"""The line that says why a script has ended."""

import pytest
from multigpu_worker.engines.train.engine import cause_in

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError("no such column")
ValueError: no such column: text"""
WARNING = """/lib/utils.py:485: UserWarning: torch.distributed is disabled
  return func(*args, **kwargs)"""


@pytest.mark.parametrize(
    ("errors", "output", "cause"),
    [
        ("", "", ""),
        ("", "3 of 4\nthe data is gone\n\n", "the data is gone"),
        (WARNING, "the data is gone", "the data is gone"),
        (f"no data\n{WARNING}", "3 of 4", "no data"),
        (TRACEBACK, "3 of 4", "ValueError: no such column: text"),
        (f"{TRACEBACK}\n\nDuring handling:\n\n{TRACEBACK.replace('text', 'x')}", "", "ValueError: no such column: x"),
        (
            f"{TRACEBACK}\nterminate called without an active exception\n{WARNING}",
            "",
            "ValueError: no such column: text",
        ),
        ("\n".join(f"[rank1]: {line}" for line in TRACEBACK.splitlines()), "", "ValueError: no such column: text"),
    ],
)
def test_it_is_found_among_warnings_and_tracebacks(errors: str, output: str, cause: str) -> None:
    assert cause_in(errors.splitlines(), output.splitlines()) == cause
