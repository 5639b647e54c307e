"""Limits that memory has lowered rise again, and back ends that tasks asked for do not pile up."""

from typing import Any

from multigpu_worker.engines.common.memory import FITTED_MIN, Limit, make_room


def after(limit: Limit, now: int, fitted: int) -> int:
    for _ in range(fitted):
        now = limit.fitted(now)
    return now


def test_a_limit_that_memory_has_lowered_rises_again_to_what_it_was() -> None:
    limit = Limit()
    assert after(limit, 1000, 10 * FITTED_MIN) == 1000, "nothing ran out"
    now = limit.lower(1000, 300)
    now = limit.lower(now, 90)
    assert after(limit, now, FITTED_MIN - 1) == 90
    assert limit.fitted(now) == 180
    assert after(limit, 180, FITTED_MIN) == 360
    assert after(limit, 360, 2 * FITTED_MIN) == 1000
    assert after(limit, 1000, 5 * FITTED_MIN) == 1000


def test_a_shortage_on_the_way_up_begins_the_count_anew() -> None:
    limit = Limit()
    now = limit.lower(1000, 400)
    now = after(limit, now, FITTED_MIN + FITTED_MIN // 2)
    assert now == 800
    now = limit.lower(now, 400)
    assert after(limit, now, FITTED_MIN - 1) == 400
    assert after(limit, now, 1) == 800


def test_of_several_back_ends_the_models_own_stays() -> None:
    loaded: dict[Any, str] = {}
    for name in ("own", "bf16", "fp16", "onnx"):
        make_room(loaded)
        loaded[name] = name
        assert len(loaded) <= 2
        assert "own" in loaded
