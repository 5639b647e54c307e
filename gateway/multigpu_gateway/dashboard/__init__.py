"""The dashboard: HTML pages at / and below /ui, which the gateway renders and htmx refreshes. Without JavaScript they
work too, except for charts and live updates.
"""

from multigpu_gateway.dashboard import dead_letters, device, fleet, models, queues, session, static, tasks, usage
from multigpu_gateway.dashboard.pages import page
from multigpu_gateway.rest.errors import error_body
from multigpu_gateway.routes import Route, Serve


def _route(get: Serve | None = None, post: Serve | None = None, *, prefix: bool = False) -> Route:
    methods = {name: serve for name, serve in (("GET", get), ("POST", post)) if serve is not None}
    return Route(methods, error_body, prefix=prefix, token_of=session.token_of)


# The route of GET /. It is not in ROUTES, because POST / belongs to TEI.
HOME = _route(page(fleet.show))
ROUTES = {
    "/ui/history": _route(fleet.history),
    "/ui/devices": _route(page(device.show), page(device.change), prefix=True),
    "/ui/queues": _route(page(queues.show), page(queues.change)),
    "/ui/tasks": _route(tasks.get, page(tasks.change), prefix=True),
    "/ui/dead-letters": _route(page(dead_letters.show), page(dead_letters.change)),
    "/ui/models": _route(page(models.show), page(models.change)),
    "/ui/usage": _route(page(usage.show)),
    "/ui/breaker": _route(post=page(fleet.reset_breaker)),
    "/ui/sign-in": _route(page(session.show), page(session.sign_in)),
    "/ui/sign-out": _route(post=page(session.sign_out)),
    "/ui/static": _route(static.serve, prefix=True),
}
