"""docs/security.md says which test tries each way in: those tests are there."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "security.md"


def test_each_way_in_has_a_test_that_is_there() -> None:
    rows = [line for line in PAGE.read_text().partition("| way in |")[2].splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, f"no test: {row}"
        for file, name in named:
            assert f"def {name}(" in (HERE / file).read_text(), f"{file} has no {name}"
