"""Twenty models on two workers with room for five each: the short form of `python -m benchmarks.models`."""

from pathlib import Path

from benchmarks.models import MODELS, drive, judge


def test_twenty_models_share_the_room_of_ten(tmp_path: Path) -> None:
    run, asked, room = drive(tmp_path, 2.5, 3, 0.1)
    judge(run, asked, room, first_loads=MODELS)  # of the second worker
    assert len({model for _, model in run.loads}) > 10, "more than there is room for at once"
