"""Limits that were lowered when memory ran out rise again."""

from multigpu_worker.engines.common.limits import FITTED_MIN, Limit


def after(limit: Limit, now: int, fitted: int) -> int:
    for _ in range(fitted):
        now = limit.fitted(now)
    return now


def test_lowered_limit_rises_to_its_old_value_and_a_shortage_meanwhile_restarts_the_count() -> None:
    limit = Limit()
    assert after(limit, 1000, 10 * FITTED_MIN) == 1000, "nothing ran out"
    now = limit.lower(1000, 300)
    now = limit.lower(now, 90)
    assert after(limit, now, FITTED_MIN - 1) == 90
    assert limit.fitted(now) == 180
    assert after(limit, 180, FITTED_MIN) == 360
    assert after(limit, 360, 2 * FITTED_MIN) == 1000
    assert after(limit, 1000, 5 * FITTED_MIN) == 1000
    limit = Limit()
    now = limit.lower(1000, 400)
    now = after(limit, now, FITTED_MIN + FITTED_MIN // 2)
    assert now == 800
    now = limit.lower(now, 400)
    assert after(limit, now, FITTED_MIN - 1) == 400
    assert after(limit, now, 1) == 800
