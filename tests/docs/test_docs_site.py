"""The documentation builds as a site, without a warning, and its SDK reference has the public names."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import multigpu
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
REFERENCE = (ROOT / "docs" / "reference.md").read_text("utf-8")


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: multigpu\.(\w+)$", REFERENCE, re.MULTILINE)
    assert sorted(listed) == multigpu.__all__


def test_the_packages_of_the_site_are_explained() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    section = page.partition("## Group `docs`")[2].partition("\n## ")[0]
    for requirement in groups["docs"]:
        name, pin, _ = requirement.partition("==")
        assert pin, requirement
        assert re.search(rf"^\| .*\b{name}\b.* \| ", section, re.MULTILINE), name


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the dependency group `docs` is not installed")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for page in ("", "quickstart", "handlers", "errors", "from-celery", "decisions/0001-one-batch-one-spec", "faq"):
        assert (site / page / "index.html").is_file(), page
    reference = (site / "reference" / "index.html").read_text("utf-8")
    methods = [name for name in dir(multigpu.Client) if not name.startswith("_")]
    missing = [name for name in methods if f'id="multigpu.Client.{name}"' not in reference]
    assert missing == []
    assert "Submits one task and returns its handle" in reference
    assert "at most this many payloads are submitted ahead" in reference
    # Nothing is loaded from elsewhere: readers behind a firewall see the whole page.
    for file in site.rglob("*.html"):
        elements = re.findall(r'<(?:script|img|link rel="stylesheet") [^>]*', file.read_text("utf-8"))
        assert [element for element in elements if re.search(r'(?:src|href)="https?:', element)] == [], file
