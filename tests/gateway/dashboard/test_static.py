"""The files that pages load: what they were when they were taken over, and nothing that the policy forbids."""

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import pytest

DASHBOARD = Path(str(files("multigpu_gateway.dashboard")))
TEMPLATES = sorted((DASHBOARD / "templates").glob("*.html"))


def test_the_libraries_are_those_of_their_projects() -> None:
    static = DASHBOARD / "static"
    lines = [line.split() for line in (static / "SHA256SUMS").read_text().splitlines()]
    listed = {name: digest for digest, name in lines}
    assert {name for name in listed if name.endswith((".js", ".css"))} == {
        "htmx-4.0.1.min.js", "uplot-1.6.32.min.js", "uplot-1.6.32.min.css"
    }  # fmt: skip
    for name, digest in listed.items():
        assert hashlib.sha256((static / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_need_no_evaluated_script_and_no_inline_style(template: Path) -> None:
    """htmx evaluates hx-on, js: values and filters of triggers with `new Function`, which the policy forbids: they
    would fail silently. Browsers ignore inline scripts and styles.
    """
    text = template.read_text()
    assert not re.search(r"\bhx-on|\bjs:|javascript:|hx-vals|hx-live|hx-confirm", text)
    assert not re.search(r'hx-trigger="[^"]*\[', text)
    assert not re.search(r"\son[a-z]+=", text)
    assert "style=" not in text
    assert "<style" not in text
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))
    assert "safe" not in re.findall(r"\|\s*(\w+)", text), "everything is escaped"
    assert not re.search(r'(?:src|href)="(?:https?:)?//', text)
