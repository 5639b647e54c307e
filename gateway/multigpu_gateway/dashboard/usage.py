"""Device time and energy of tasks: in all, and by each of USAGE_KEYS."""

from datetime import UTC, datetime, timedelta

from multigpu.options import USAGE_KEYS

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard.pages import Page
from multigpu_gateway.http import Request

PERIODS = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(days=7), "month": timedelta(days=30)}
ROWS = 100  # rows of each table; GET /v1/usage and `mgpuctl energy usage` have all


async def show(request: Request, pair: ClientPair) -> Page:
    period = request.query.get("period", "day")
    begin = datetime.now(UTC) - PERIODS.get(period, PERIODS["day"])
    reports = {key: await pair.admin.usage([key], begin=begin) for key in USAGE_KEYS}
    total = (await pair.admin.usage([], begin=begin)).usage
    values = {"reports": reports, "total": total[0] if total else None, "rows": ROWS}
    return Page("usage.html", {**values, "periods": list(PERIODS), "period": period}, live=False)
