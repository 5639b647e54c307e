"""Coverage-guided inputs: atheris (libFuzzer) on one target, in a separate process.

`python -m tests.hostile coverage` runs the targets one after the other. `python -m tests.hostile.coverage TARGET
[OPTION]` runs one, with libFuzzer's options; with a file's name instead it runs that input. libFuzzer keeps a crashing
input in a file and prints its name.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import click

SEEDS = 200  # messages in the initial corpus: random bytes are rarely a message
SLOW = ("Watch",)  # targets that wait for each input


@click.command(name="coverage")
@click.option("--seconds", default=20, help="For each target.")
@click.option("--only", default="", help="The targets whose names contain this.")
@click.option("--seed", default=1)
def command(seconds: int, only: str, seed: int) -> None:
    """Runs each target with coverage-guided inputs. Exit code 1: something crashed."""
    from tests.hostile import run

    with run.all_targets() as targets:
        names = [
            target.name for target in targets if only in target.name and not any(word in target.name for word in SLOW)
        ]
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
    print(f"{total:>10,}  in all, seed {seed}; targets that crashed: {failed}")
    sys.exit(1 if failed else 0)


def fuzz(name: str, options: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["multigpu", "multigpu_master", "multigpu_worker"]):
        from tests.hostile import run
        from tests.hostile.inputs import Maker
    with run.all_targets() as targets:
        target = next(target for target in targets if target.name == name)
        folder = next((Path(option) for option in options if Path(option).is_dir()), None)
        if folder is not None:
            maker = Maker(Random(name))
            for number in range(SEEDS):
                (folder / str(number)).write_bytes(target.make(maker))
        atheris.Setup([sys.argv[0], *options], target.feed)
        atheris.Fuzz()


if __name__ == "__main__":
    fuzz(sys.argv[1], sys.argv[2:])
