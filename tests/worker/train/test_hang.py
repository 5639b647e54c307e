"""Jobs without progress, and where their ranks are."""

import pytest
from multigpu_worker.engines.train.hang import HangWatch, place_of, places, tell_place


class Store:
    """What is used of torch's Store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        value = int(self.values.get(key, b"0")) + amount
        self.values[key] = b"%d" % value
        return value

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_progress_of_any_rank_counts_for_all(clock: list[float]) -> None:
    store = Store()
    watches = [HangWatch(store, 10.0) for _ in range(3)]
    for second in range(30):
        clock[0] += 1.0
        if second % 5 == 0:
            watches[second % 3].progress()
        assert not any(watch.hangs() for watch in watches), second
    told = []
    for _ in range(12):
        clock[0] += 1.0
        told.append([watch.hangs() for watch in watches])
    assert told[-1] == [True] * 3
    assert told[3] == [False] * 3


def test_a_suspended_rank_does_not_count_the_time_of_its_suspension(clock: list[float]) -> None:
    """Its script was suspended with it, as by `docker pause`, and was then ended for a hang."""
    for suspended_s in (5.0, 9.0, 60.0):
        watch = HangWatch(Store(), 10.0)
        told = []
        for seconds in (1.0, suspended_s, *[1.0] * 10):
            clock[0] += seconds
            told.append(watch.hangs())
        assert told == [False] * 11 + [True], suspended_s


def test_places_of_ranks_that_do_not_answer_are_said_to_be_unknown(clock: list[float]) -> None:
    store = Store()
    tell_place(store, 1, "waits in barrier")
    assert places(store, 2) == ["does not say where it is", "waits in barrier"]


STACK = """before
Fatal Python error: Aborted

Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007e (most recent call first):
{frames}

Extension modules: numpy, torch._C (total: 20)"""
TORCH = "/venv/lib/python3.11/site-packages/torch/distributed"


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        (
            [f'{TORCH}/distributed_c10d.py", line 2991 in all_reduce', f'{TORCH}/c10d_logger.py", line 83 in wrapper',
             '/home/a/train.py", line 33 in step', '/home/a/train.py", line 50 in <module>'],
            "waits in all_reduce at train.py line 33 in step",
        ),
        (
            ['/home/a/train.py", line 30 in step', '/home/a/train.py", line 50 in <module>'],
            "is at train.py line 30 in step",
        ),
        (
            [f'{TORCH}/../autograd/graph.py", line 800 in _engine_run_backward', '/home/a/train.py", line 31 in step'],
            "waits in _engine_run_backward at train.py line 31 in step",
        ),
        ([f'{TORCH}/distributed_c10d.py", line 1 in barrier'], "waits in barrier"),
        ([], "has left no stack"),
    ],
)  # fmt: skip
def test_the_place_of_a_rank_is_read_from_its_stack(frames: list[str], place: str) -> None:
    text = STACK.format(frames="\n".join(f'  File "{frame}' for frame in frames))
    assert place_of(text.splitlines()) == place


def test_a_process_without_a_stack_has_no_place() -> None:
    assert place_of(["before"]) == "has left no stack"


def test_of_a_rank_that_was_ending_already_the_traceback_counts() -> None:
    ending = STACK.format(frames='  File "/venv/lib/python3.11/site-packages/torch/library.py", line 5 in _del_library')
    text = f"""[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/a/train.py", line 50, in <module>
[rank0]:     work()
[rank0]:     ~~~~^^
[rank0]:   File "/home/a/train.py", line 33, in work
[rank0]:     dist.all_reduce(x)
[rank0]:   File "{TORCH}/c10d_logger.py", line 83, in wrapper
[rank0]:   File "{TORCH}/distributed_c10d.py", line 2991, in all_reduce
[rank0]: RuntimeError: [gloo] Connection closed by peer
{ending}"""
    assert place_of(text.splitlines()) == "waits in all_reduce at train.py line 33 in work"
