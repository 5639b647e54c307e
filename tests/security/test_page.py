"""The tests named in docs/security.md exist."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "security.md"


def test_each_attack_in_the_docs_has_a_test() -> None:
    rows = [line for line in PAGE.read_text().partition("| attack |")[2].splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, f"no test: {row}"
        for file, name in named:
            assert f"def {name}(" in (HERE / file).read_text(), f"{file} has no {name}"
