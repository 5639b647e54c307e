"""The line that says why a script has ended."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from multigpu_worker.engines.finetune.settings import BAD_INPUT, OUT_OF_MEMORY
from multigpu_worker.engines.train.engine import Rank, cause_in
from multigpu_worker.engines.train.errors import ScriptError

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


@pytest.mark.parametrize(
    ("code", "stderr", "error_type", "message"),
    [
        (OUT_OF_MEMORY, ["8 are tried"], "OutOfMemory", "rank 0: 8 are tried"),
        (OUT_OF_MEMORY, [], "OutOfMemory", "rank 0: exit code 75, and nothing on stderr; its log is in /logs"),
        (BAD_INPUT, ["no texts"], "BadInput", "no texts"),
        (BAD_INPUT, [], "BadInput", "exit code 65, and nothing on stderr; its log is in /logs"),
    ],
)
def test_a_finetuning_that_wrote_nothing_on_stderr_has_a_reason_too(
    code: int, stderr: list[str], error_type: str, message: str
) -> None:
    rank = Rank.__new__(Rank)
    rank._place = SimpleNamespace(rank=0, world_size=1)  # type: ignore[assignment]
    rank._job = SimpleNamespace(finetune={}, retries=0)  # type: ignore[assignment]
    rank._item = SimpleNamespace(attempt=1)  # type: ignore[assignment]
    rank._stdout = SimpleNamespace(path=Path("/logs/stdout"))  # type: ignore[assignment]
    rank._errors, rank._output = stderr, []
    with pytest.raises(ScriptError, match=f"^{message}$") as raised:
        rank._failed(SimpleNamespace(exitcode=code, error_file=""))
    assert raised.value.error_type == error_type
