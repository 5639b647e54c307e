"""`mgpuctl config show`: the settings in force."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from multigpu.cli import show
from multigpu.cli.commands import Group
from multigpu.cli.options import config_option, json_option, load_config
from multigpu.config import config
from multigpu.config import values as config_values


@click.group("config", cls=Group)
def config_() -> None:
    """Show the settings in force."""


@config_.command(
    "show",
    examples=(
        ("mgpuctl config show", "Every setting, and where it comes from."),
        ("mgpuctl config show worker", "The settings of one section."),
    ),
)
@click.argument("section", type=click.Choice([cls.section for cls in config.CONFIG_CLASSES]), required=False)
@config_option
@json_option
def show_config(section: str | None, as_json: bool) -> None:
    """Print the settings in force. Each with its source: default, file or environment."""
    sections: dict[str, dict[str, dict[str, Any]]] = {}
    found: Path | None = None
    for cls in config.CONFIG_CLASSES:
        if section in (None, cls.section):
            loaded = load_config(cls)
            found = loaded.file
            sections[cls.section] = {
                field.name: {"value": getattr(loaded.config, field.name), "source": loaded.sources[field.name]}
                for field in dataclasses.fields(loaded.config)  # type: ignore[arg-type]  # every config is a dataclass
            }
    if as_json:
        show.value(json.loads(json.dumps({"file": found, "settings": sections}, default=str)))
        return
    show.line(f"# file: {found or 'none; the first of ~/.config/multigpu/config.toml, /etc/multigpu/config.toml'}")
    for name, settings in sections.items():
        show.line(f"\n[{name}]")
        key_width = max(map(len, settings))
        texts = {key: config_values.format_value(key, entry["value"]) or '""' for key, entry in settings.items()}
        value_width = min(32, max(map(len, texts.values())))
        for key, entry in settings.items():
            show.line(f"{key:<{key_width}} = {texts[key]:<{value_width}}  # {entry['source']}")
