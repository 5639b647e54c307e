"""A user's own strategy: a distribution with an entry point, installed for real, found, and used."""

import subprocess
import sys
from pathlib import Path

import pytest
from multigpu_master.strategies.registry import canonical_name, load_strategies

DOC = Path(__file__).parents[3] / "docs" / "strategies.md"
RUN = """
from multigpu_master.core import events as ev
from multigpu_master.core.workers.info import Capability, Telemetry, WorkerInfo
from multigpu_master.core.model import Task
from multigpu_master.core.spec import Spec
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.strategies.registry import canonical_name, load_strategies
strategies = load_strategies()
name = canonical_name("cool", strategies)
core = Core(strategies, Limits(), 1, lambda: 0.0, name)
for i, celsius in enumerate((80.0, 40.0, 60.0), 1):
    core.handle(ev.Hello(i, WorkerInfo(worker_id=f"w{i}", capabilities=(Capability(kind="run"),), slots=4)), 1.0)
    core.handle(ev.Heartbeat(i, [], 0, Telemetry(temperature_celsius=celsius)), 1.0)
spec = Spec(kind="run")
tasks = [Task(spec, "", b"") for _ in range(2)]
core.handle(ev.Submit(spec, tasks), 1.0)
print(name, *[t.lease.worker.worker_id for t in tasks])
"""

MISTAKEN = """
from multigpu_master.core import events as ev
from multigpu_master.core.workers.info import Capability, WorkerInfo
from multigpu_master.core.model import Task
from multigpu_master.core.placement.explain import explain
from multigpu_master.core.spec import Spec
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.strategies.registry import load_strategies
core = Core(load_strategies(), Limits(), 1, lambda: 0.0, "coolest")
core.handle(ev.Hello(1, WorkerInfo(worker_id="w", capabilities=(Capability(kind="run"),))), 1.0)
spec = Spec(kind="run")
task = Task(spec, "", b"")
core.handle(ev.Submit(spec, [task]), 1.0)
print(task.lease is not None)
print(*explain(core, task, 1.0).candidates[0].excluded_by)
"""
# How modules with a strategy begin.
BASE = "from multigpu_master.core.strategy import Strategy\nclass Coolest(Strategy):\n  score = lambda *_: 0.0;"
MINE = f"{BASE} name = summary = score_meaning = 'coolest'"


def install(site: Path, source: str, entry: str) -> None:
    """Puts a package and its metadata where an installer would."""
    (site / "coolest.py").write_text(source)
    info = site / "coolest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coolest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[multigpu.strategies]\n{entry}\n")


def run(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False)


def test_the_strategy_that_the_docs_show_works(tmp_path: Path) -> None:
    source = DOC.read_text("utf-8").split("```python\n")[1].split("```")[0]
    install(tmp_path, source, "coolest = coolest:Coolest")
    done = run(tmp_path, RUN)
    assert done.stdout.split() == ["coolest", "w2", "w2"], done.stderr


@pytest.mark.parametrize(
    ("source", "entry", "says"),
    [
        ("raise RuntimeError('oh')", "coolest = coolest:Coolest", "can't be used: RuntimeError('oh')"),
        ("raise SystemExit(9)", "coolest = coolest:Coolest", "can't be used: SystemExit(9)"),
        ("class Coolest: pass", "coolest = coolest:Coolest", "not derived from multigpu_master.core.strategy.Strategy"),
        (f"{BASE} name = 'coolest'", "coolest = coolest:Coolest", "it lacks summary, score_meaning"),
        (f"{BASE} name = summary = score_meaning = 'warm'", "coolest = coolest:Coolest", "its name is 'warm'"),
        (f"{MINE}; aliases = 'xy'", "coolest = coolest:Coolest", "its aliases are not a tuple"),
        (f"{MINE}; aliases = ('memory',)", "coolest = coolest:Coolest", "are both called 'memory'"),
        (f"{BASE} name = summary = score_meaning = 'auto'", "auto = coolest:Coolest", "are both called 'auto'"),
        ("", "coolest = coolest:Coolest", "can't be used: AttributeError"),
    ],
)
def test_a_broken_strategy_is_named(tmp_path: Path, source: str, entry: str, says: str) -> None:
    install(tmp_path, source, entry)
    done = run(tmp_path, "from multigpu_master.strategies.registry import load_strategies; load_strategies()")
    last = done.stderr.strip().splitlines()[-1]
    assert "StrategyError" in last
    assert "coolest:Coolest" in last
    assert says in last


@pytest.mark.parametrize(
    ("method", "mistake"),
    [
        ("def score(self, *_): raise RuntimeError('oh')", "RuntimeError('oh') in excludes() or score()"),
        ("def score(self, *_): return float('nan')", "score() returned nan, which is not a number"),
        ("def score(self, *_): return 'low'", "score() returned 'low', which is not a number"),
        ("def score(self, worker): return 0.0", "TypeError"),
        ("def excludes(self, *_): return True", "excludes() returned True, which is neither a text nor None"),
        ("def excludes(self, *_): return self.nosuch", "AttributeError"),
    ],
)
def test_a_mistake_of_a_strategy_excludes_the_worker_and_ends_no_master(
    tmp_path: Path, method: str, mistake: str
) -> None:
    install(tmp_path, f"{MINE}\n  def score(self, *_): return 0.0\n  {method}\n", "coolest = coolest:Coolest")
    done = run(tmp_path, MISTAKEN)
    assert done.returncode == 0, done.stderr
    leased, why = done.stdout.splitlines()[-2:]
    assert leased == "False"
    assert "the strategy coolest has a mistake: " in why
    assert mistake in why


def test_names_and_aliases() -> None:
    strategies = load_strategies()
    assert {"auto", "round_robin", "memory_usage", "compute_load", "task_type", "static_partition"} <= set(strategies)
    assert canonical_name("memory", strategies) == "memory_usage"
    assert canonical_name("utilization", strategies) == "compute_load"
    assert canonical_name("auto", strategies) == "auto"
    assert canonical_name("nosuch", strategies) is None
