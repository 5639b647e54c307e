"""Settings of the worker that name files and folders, which it checks before it starts."""

from pathlib import Path
from typing import Any

import pytest
from multigpu.config.config import ConfigError, WorkerConfig
from multigpu_worker.main import PATHS, _check_files

NOBODY = "~no-such-user/x"


@pytest.mark.parametrize("values", [*({name: NOBODY} for name in PATHS), {"models": (f"m={NOBODY}",)}], ids=str)
def test_a_path_in_the_home_of_nobody_is_a_wrong_setting(values: dict[str, Any]) -> None:
    """Not a traceback: the program ends with the exit code of wrong settings."""
    with pytest.raises(ConfigError, match=rf"{next(iter(values))} has {NOBODY}: .*home directory.* Write the whole"):
        _check_files(WorkerConfig(**values))


def test_a_folder_is_no_python_of_vllm(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no program"):
        _check_files(WorkerConfig(vllm_python=str(tmp_path)))
    program = tmp_path / "python"
    program.touch(mode=0o755)
    _check_files(WorkerConfig(vllm_python=str(program)))
