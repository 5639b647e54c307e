"""Where the master wants tokens, a person signs in with one, and sees and does what it may."""

from collections.abc import Iterator

import pytest

from tests.gateway.conftest import GatewayProcess
from tests.gateway.dashboard.conftest import Visitor
from tests.security.secured import SecuredFleet


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredFleet]:
    with SecuredFleet(tmp_path_factory.mktemp("secured")) as it:
        yield it


@pytest.fixture(scope="module")
def gateway(secured: SecuredFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), secured.fleet.address) as running:
        yield running


def sign_in(visitor: Visitor, token: str, target: str = "/") -> None:
    response, _ = visitor.post("/ui/sign-in", token=token, next=target)
    assert (response.status, response.headers["location"]) == (303, target)


def test_without_a_token_every_page_leads_to_the_sign_in(visitor: Visitor) -> None:
    for path in ("/", "/ui/tasks?queue=a", "/ui/devices/w0"):
        response, _ = visitor.get(path)
        assert response.status == 303
        assert response.headers["location"].startswith("/ui/sign-in?next=")
    response, _ = visitor.get("/", **{"hx-request": "true"})
    assert (response.status, response.headers["hx-redirect"]) == (200, "/ui/sign-in?next=%2F")
    assert visitor.post("/ui/queues", queue="default", action="pause")[0].headers["location"] == "/ui/sign-in?next=%2F"


def test_the_token_is_kept_from_scripts_and_other_sites(visitor: Visitor, secured: SecuredFleet) -> None:
    response, _ = visitor.post("/ui/sign-in", token=secured.admin_token, next="/ui/queues")
    assert response.headers["set-cookie"].endswith("; Path=/; HttpOnly; SameSite=Strict")
    assert "Sign out" in visitor.page("/ui/queues").text
    assert "refuses" not in visitor.page("/ui/sign-in").text
    response, _ = visitor.post("/ui/sign-out")
    assert "Max-Age=0" in response.headers["set-cookie"]
    assert visitor.get("/")[0].status == 303


def test_a_cookie_opens_pages_and_no_other_route(
    visitor: Visitor, gateway: GatewayProcess, secured: SecuredFleet
) -> None:
    """Other sites could make a signed-in browser call them: their answers are no pages, and ask for no origin."""
    sign_in(visitor, secured.admin_token)
    assert gateway.call("GET", "/v1/tasks", headers={"cookie": visitor.cookie})[0].status == 401
    assert (
        gateway.call("POST", "/v1/tasks", {"kind": "echo", "payload": 1}, {"cookie": visitor.cookie})[0].status == 401
    )


def test_cookies_of_other_programs_of_the_host_do_no_harm(visitor: Visitor, secured: SecuredFleet) -> None:
    """Browsers send them here too, also those that are no cookies by the standard: http.cookies reads none of all."""
    sign_in(visitor, secured.admin_token)
    cookies = f'prefs={{"dark": true}}; a[0]=1; {visitor.cookie}; b="'
    assert visitor.gateway.call("GET", "/", headers={"cookie": cookies})[0].status == 200


def test_a_wrong_token_is_told_so(visitor: Visitor) -> None:
    response, page = visitor.post("/ui/sign-in", token="what; Path=/evil", next="/")
    assert (response.status, response.headers["set-cookie"]) == (401, None)
    assert "This is no token" in page.text
    sign_in(visitor, "mgpu_000000000000_" + "0" * 64)
    location = visitor.get("/")[0].headers["location"]
    assert "The master refuses this token" in visitor.page(location).text


def test_signing_in_leads_to_no_other_site(visitor: Visitor, secured: SecuredFleet) -> None:
    for target in ("https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)", "/ui/\r\nX: y"):
        response, _ = visitor.post("/ui/sign-in", token=secured.admin_token, next=target)
        assert response.headers["location"] == "/"


def test_a_role_sees_and_does_what_it_may(visitor: Visitor, secured: SecuredFleet) -> None:
    _, reader = secured.create("dashboard-reader", "read")
    sign_in(visitor, reader)
    assert "Workers" in visitor.page("/").text
    response, page = visitor.post("/ui/queues", queue="default", action="pause")
    assert response.status == 403
    assert "Not allowed" in page.text
    _, night = secured.create("dashboard-night", "submit", queues=["night"])
    sign_in(visitor, night)
    response, page = visitor.post("/ui/tasks", action="submit", kind="echo", payload="1", queue="day")
    assert response.status == 403
    assert "not for the queue 'day'" in page.text
    visitor.follow("/ui/tasks", action="submit", kind="echo", payload="1", queue="night")
    assert "1 tasks" in visitor.page("/ui/tasks?queue=night").text


def test_what_an_administrator_does_is_audited_with_the_token(visitor: Visitor, secured: SecuredFleet) -> None:
    token_id, token = secured.create("dashboard-admin", "admin")
    sign_in(visitor, token)
    visitor.follow("/ui/queues", queue="audited", action="pause")
    log = (secured.fleet.data_dir / "audit.log").read_text()
    (line,) = [line for line in log.splitlines() if "PauseQueue" in line and "audited" in line]
    assert token_id in line
    assert token not in log
