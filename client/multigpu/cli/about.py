"""`mgpuctl version`, `mgpuctl config show` and `mgpuctl completion`: commands that need no master."""

import dataclasses
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from multigpu.cli import show
from multigpu.cli.commands import Command, Group
from multigpu.cli.options import config_option, json_option, load_config
from multigpu.config import config
from multigpu.config import values as config_values

HOW_TO_INSTALL = {
    "bash": 'eval "$(mgpuctl completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(mgpuctl completion zsh)"    # in ~/.zshrc',
    "fish": "mgpuctl completion fish > ~/.config/fish/completions/mgpuctl.fish",
}


@click.command(cls=Command, examples=(("mgpuctl version --json", "The same, for programs."),))
@json_option
def version(as_json: bool) -> None:
    """The version of mgpuctl. `mgpuctl status` tells the master's."""
    own = importlib.metadata.version("multigpu")
    python = ".".join(map(str, sys.version_info[:3]))
    if as_json:
        show.value({"multigpu": own, "python": python})
    else:
        show.line(f"mgpuctl {own} (Python {python})")


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


@click.command(cls=Command, examples=tuple((how, f"For {shell}.") for shell, how in HOW_TO_INSTALL.items()))
@click.argument("shell", type=click.Choice(list(HOW_TO_INSTALL)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script for the shell's completion of mgpuctl."""
    shell_class = get_completion_class(shell)
    assert shell_class is not None
    show.line(shell_class(context.find_root().command, {}, "mgpuctl", "_MGPUCTL_COMPLETE").source())
