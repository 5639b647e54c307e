"""The table of old variables in docs/configuration.md says what the deploy script reads: no name more, none less."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = {"MGPU_VENV", "CUDA_VISIBLE_DEVICES", "BASH_SOURCE", "PYTHON"}


def test_the_table_has_what_the_script_reads() -> None:
    page = (ROOT / "docs/configuration.md").read_text("utf-8")
    rows = re.findall(r"^\| `([A-Z_0-9]+)` \|", page.partition("## Names from before")[2], re.MULTILINE)
    script = (ROOT / "tools/deploy/machine.sh").read_text("utf-8")
    read = set(re.findall(r"\$\{([A-Z][A-Z_0-9]+)", script)) | set(re.findall(r"\(truth ([A-Z][A-Z_0-9]+)", script))
    assert set(rows) == read - HIDDEN
    assert len(rows) == len(set(rows)) == 15
