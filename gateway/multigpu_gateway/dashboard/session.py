"""Signing in with a token of the master. The browser keeps the token in a cookie that scripts and other sites can't
use, so gateways have no sessions. Signing in does not check the token: the next page fails if the master rejects it.
"""

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard.pages import COOKIE, SIGN_IN, Page, Redirect, form_of
from multigpu_gateway.errors import UNAUTHORIZED
from multigpu_gateway.http import Headers, Request

_TOKEN_CHARACTERS_MAX = 1000


def token_of(request: Request) -> str:
    """Returns the token in the Authorization header or else in the cookie; "" if there is none."""
    return request.token or request.cookie(COOKIE)


async def show(request: Request, _pair: ClientPair) -> Page:
    target = request.query.get("next", "")
    rejected = "The master refuses this token: it is unknown, was revoked or has expired."
    return _page(target, rejected if target and request.cookie(COOKIE) else "")


async def sign_in(request: Request, _pair: ClientPair) -> Page | Redirect:
    form = await form_of(request)
    token, target = form.get("token", "").strip(), form.get("next", "")
    readable = token.isascii() and token.isprintable() and not set(token) & set(' ",;\\')
    if not token or not readable or len(token) > _TOKEN_CHARACTERS_MAX:
        return _page(target, "This is no token: one begins with mgpu_.", UNAUTHORIZED)
    return Redirect(_local(target), _cookie(request, token))


async def sign_out(request: Request, _pair: ClientPair) -> Redirect:
    return Redirect(SIGN_IN, _cookie(request, ""))


def _page(target: str, problem: str, status: int = 200) -> Page:
    return Page("sign_in.html", {"next": target, "problem": problem}, live=False, status=status)


def _local(target: str) -> str:
    """Returns `target` if it is a page of this dashboard, else "/". Prevents redirects to other sites."""
    local = target == "/" or target.startswith(("/?", "/ui/"))
    return target if local and target.isascii() and target.isprintable() else "/"


def _cookie(request: Request, token: str) -> Headers:
    secure = "; Secure" if request.secure else ""
    age = "" if token else "; Max-Age=0"
    return [(b"set-cookie", f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict{secure}{age}".encode())]
