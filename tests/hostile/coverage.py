"""Inputs that coverage guides: atheris (libFuzzer) at one door, in a process of its own.

`python -m tests.hostile coverage` takes the doors one after the other. `python -m tests.hostile.coverage DOOR [OPTION]`
takes one alone, with libFuzzer's own options; a file's name in their place feeds it again. What crashes is kept by
libFuzzer in a file whose name it says.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import click

SEEDS = 200  # messages that begin the corpus: bytes of chance alone rarely are one
SLOW = ("Watch",)  # doors that wait with each input


@click.command(name="coverage")
@click.option("--seconds", default=20, help="For each door.")
@click.option("--only", default="", help="The doors whose names contain this.")
@click.option("--seed", default=1)
def command(seconds: int, only: str, seed: int) -> None:
    """Tries each door with inputs that atheris finds by their coverage. Exit code 1: something crashed."""
    from tests.hostile import run

    with run.all_doors() as doors:
        names = [door.name for door in doors if only in door.name and not any(word in door.name for word in SLOW)]
    total = failed = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="multigpu-corpus-") as corpus:
            options = [f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=4096", "-rss_limit_mb=4096", corpus]
            argv = [sys.executable, "-m", "tests.hostile.coverage", name, *options]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=10 * seconds + 120, check=False)
        runs = [int(n) for n in re.findall(r"(?:Done |^#)(\d+)", done.stderr, re.MULTILINE)]
        cover = re.findall(r"cov: (\d+)", done.stderr)
        crashed = done.returncode != 0
        total, failed = total + max(runs, default=0), failed + crashed
        print(f"{max(runs, default=0):>10,}  {name}, coverage {cover[-1] if cover else '?'}", flush=True)
        if crashed:
            print(done.stderr[-3000:] + done.stdout[-1000:])
    print(f"{total:>10,}  in all, seed {seed}; doors that crashed: {failed}")
    sys.exit(1 if failed else 0)


def fuzz(name: str, options: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["multigpu", "multigpu_master", "multigpu_worker"]):
        from tests.hostile import run
        from tests.hostile.inputs import Maker
    with run.all_doors() as doors:
        door = next(door for door in doors if door.name == name)
        folder = next((Path(option) for option in options if Path(option).is_dir()), None)
        if folder is not None:
            maker = Maker(Random(name))
            for number in range(SEEDS):
                (folder / str(number)).write_bytes(door.make(maker))
        atheris.Setup([sys.argv[0], *options], door.feed)
        atheris.Fuzz()


if __name__ == "__main__":
    fuzz(sys.argv[1], sys.argv[2:])
