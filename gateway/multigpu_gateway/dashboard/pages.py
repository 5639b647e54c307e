"""Functions that all pages share: rendering, forms, errors, and the headers that protect against other sites."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import jinja2

from multigpu_gateway import VERSION
from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard import text
from multigpu_gateway.errors import BAD_REQUEST, FORBIDDEN, UNAUTHORIZED, UNAVAILABLE, HttpError, http_error
from multigpu_gateway.http import Headers, Request
from multigpu_gateway.routes import Serve

SIGN_IN = "/ui/sign-in"
COOKIE = "mgpu_token"
HTML = b"text/html; charset=utf-8"
SEE_OTHER = 303
# Pages load nothing from other sites, and run no inline scripts.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Headers = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
NAVIGATION = {
    "/": "Fleet",
    "/ui/queues": "Queues",
    "/ui/tasks": "Tasks",
    "/ui/dead-letters": "Dead letters",
    "/ui/models": "Models",
    "/ui/usage": "Usage",
    "/docs": "API",
}
# Messages about an action that was done. The page after the redirect shows them.
ACTION_MESSAGES = {
    "cancelled": "Cancelled {tasks}.",
    "requeued": "Requeued {letters}.",
    "deleted": "Deleted {letters}.",
    "submitted": "The task was submitted.",
    "paused": "The queue is paused.",
    "resumed": "The queue is served again.",
    "loading": "The model is being loaded.",
    "unloading": "The model is being unloaded.",
    "cordoned": "The worker gets no new tasks.",
    "draining": "The worker finishes its tasks and gets no new ones.",
    "uncordoned": "The worker gets tasks again.",
    "forgotten": "The worker was removed from the list.",
    "breaker": "The circuit breaker was reset.",
}
ACTION_COOKIE, ACTION_COOKIE_S = "mgpu_done", 30
ROWS = 50
# How long a page waits for the master. For actions, only the timeouts of the SDK's client apply.
PAGE_TIMEOUT_S = 4.0


@dataclass
class Page:
    """A page to render. `live`: the browser fetches it again every two seconds."""

    template: str
    values: dict[str, Any] = field(default_factory=dict)
    live: bool = True
    status: int = 200
    headers: Headers = field(default_factory=list)


@dataclass
class Redirect:
    """A redirect to a path of the gateway."""

    path: str
    headers: Headers = field(default_factory=list)
    # The action that was done (a key of ACTION_MESSAGES), and the number of tasks or dead letters.
    action: str = ""
    n: int = 0


View = Callable[[Request, ClientPair], Awaitable[Page | Redirect]]

_templates = jinja2.Environment(
    loader=jinja2.PackageLoader(__package__),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
    auto_reload=False,
)
_templates.filters |= {
    "age": text.age, "counted": text.counted, "duration": text.duration, "energy": text.energy, "number": text.number,
    "percent": text.percent, "rate": text.rate, "size": text.size, "task_state": text.state, "time": text.time,
    "watts": text.watts,
}  # fmt: skip
_templates.globals |= {"navigation": NAVIGATION, "version": VERSION, "url": lambda path: quote(str(path), safe="")}


def page(view: View) -> Serve:
    """Returns a function that serves a view. An error becomes a page; UNAUTHORIZED, a redirect to the sign-in page."""

    async def serve(request: Request, pair: ClientPair) -> None:
        try:
            if request.method == "POST":
                check_origin(request)
                answer = await view(request, pair)
            else:
                answer = await _in_time(view(request, pair))
        except Exception as error:  # noqa: BLE001  http_error re-raises unexpected errors
            failure = http_error(error)
            if failure.status == UNAUTHORIZED:
                target = url_of(request) if request.method == "GET" else "/"
                answer = Redirect(f"{SIGN_IN}?{urlencode({'next': target})}")
            else:
                values = {"error": failure, "acted": request.method == "POST"}
                answer = Page("error.html", values, status=failure.status, headers=failure.headers)
                answer.live = request.method == "GET"
        await _send(request, answer)

    return serve


async def _in_time(view: Awaitable[Page | Redirect]) -> Page | Redirect:
    """Awaits a view. Raises HttpError after PAGE_TIMEOUT_S: the SDK's client would wait longer for the master."""
    try:
        async with asyncio.timeout(PAGE_TIMEOUT_S):
            return await view
    except TimeoutError:
        message = f"the master did not answer within {PAGE_TIMEOUT_S:g} s; this page tries again by itself"
        raise HttpError(UNAVAILABLE, message, retry_s=1.0) from None


async def _send(request: Request, answer: Page | Redirect) -> None:
    if isinstance(answer, Redirect):
        # htmx would follow a Location and put the target's content into this page.
        fetched = request.header(b"hx-request") == "true"
        name, status = (b"hx-redirect", 200) if fetched else (b"location", SEE_OTHER)
        headers = [*HEADERS, *answer.headers, (name, answer.path.encode())]
        if answer.action:
            headers.append(_action_cookie(f"{answer.action}.{answer.n}", ACTION_COOKIE_S))
        await request.respond(status, b"", HTML, headers)
        return
    query = request.query
    headers = [*HEADERS, *answer.headers]
    # The message is in a cookie, not in the URL, so that it is shown once even if a person shares the URL.
    action, _, n = request.cookie(ACTION_COOKIE).partition(".")
    if action and request.header(b"hx-request") != "true":
        headers.append(_action_cookie("", 0))
    paused = query.get("live") == "off"
    values = {
        "path": request.path, "page_url": url_of(request), "query": defaultdict(str, query),
        "token": bool(request.cookie(COOKIE)),
        "action_message": _action_message(action, whole_of(n)), "live": answer.live and not paused,
        "may_pause": answer.live, "paused": paused, "with_query": lambda **fields: with_query(request, **fields),
        **answer.values,
    }  # fmt: skip
    body = _templates.get_template(answer.template).render(values).encode("utf-8", "replace")
    await request.respond(answer.status, body, HTML, headers)


def _action_message(action: str, n: int) -> str:
    message = ACTION_MESSAGES.get(action, "")
    told = message.format(tasks=text.counted(n, "task"), letters=text.counted(n, "dead letter"))
    return f"{told} None was left." if told != message and not n else told


def _action_cookie(value: str, age_s: int) -> tuple[bytes, bytes]:
    return b"set-cookie", f"{ACTION_COOKIE}={value}; Path=/; Max-Age={age_s}; HttpOnly; SameSite=Strict".encode()


def url_of(request: Request) -> str:
    """Returns the path and query of the request, without empty fields."""
    return with_query(request)


def with_query(request: Request, **fields: object) -> str:
    """Returns the path and query of the request with these fields replaced; None removes a field."""
    query: dict[str, Any] = {**request.query, **fields}
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return quote(request.path) + (f"?{urlencode(given)}" if given else "")


def check_origin(request: Request) -> None:
    """Raises HttpError if the form comes from another site, which could use a signed-in browser (CSRF).

    Browsers send Sec-Fetch-Site, older ones only Origin: https://www.w3.org/TR/fetch-metadata/
    """
    site = request.header(b"sec-fetch-site")
    origin = urlsplit(request.header(b"origin")).netloc
    if site != "same-origin" and (site or not origin or origin != request.header(b"host")):
        raise HttpError(FORBIDDEN, "this form is not of this dashboard: open the page again, and use its buttons")


async def form_of(request: Request) -> dict[str, str]:
    """Returns the fields of a form. Raises HttpError if the request body is not a form."""
    try:
        return dict(parse_qsl((await request.body()).decode(), keep_blank_values=True, max_num_fields=100))
    except ValueError as error:
        raise HttpError(BAD_REQUEST, f"the form can't be read: {error}") from None


def action_of(form: Mapping[str, str], *known: str) -> str:
    """Returns the action that the form asks for. Raises HttpError if it is none of `known`."""
    action = form.get("action", "")
    if action not in known:
        raise HttpError(BAD_REQUEST, f"there is no action {action!r}; there are {', '.join(known)}")
    return action


def task_id_of(text: str) -> int:
    """Returns the task_id. Raises HttpError if the text is not one."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise HttpError(BAD_REQUEST, f"{text!r} is no task_id")
    return int(text)


def number_of(request: Request, name: str) -> int:
    """Returns a parameter of the query string that is a whole number from 0, or 0 if it is not one."""
    return whole_of(request.query.get(name, ""))


def whole_of(value: str) -> int:
    """Returns the number; 0 if the text is not a whole number of at most 9 digits."""
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else 0
