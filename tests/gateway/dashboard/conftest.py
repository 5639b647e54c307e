"""Pages of the dashboard as a browser without scripts sees them."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from http.client import HTTPResponse
from urllib.parse import urlencode

import pytest

from tests.gateway.conftest import GatewayProcess


class Text(HTMLParser):
    """The visible text of a page, its links and the texts of its tables' rows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.rows: list[str] = []
        self.forms: list[dict[str, str]] = []
        self._words: list[str] = []
        self._hidden = 0
        self.feed(page)
        self.text = squeezed(" ".join(self._words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = {name: value or "" for name, value in attrs}
        self._hidden += tag in ("script", "style", "title")
        if tag == "a":
            self.links.append(fields["href"])
        if tag == "tr":
            self._row_at = len(self._words)
        if tag == "form":
            self.forms.append({})
        if tag == "input" and self.forms and "value" in fields:
            self.forms[-1][fields["name"]] = fields["value"]

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "title")
        if tag == "tr":
            self.rows.append(squeezed(" ".join(self._words[self._row_at :])))

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._words.append(data)


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


class Visitor:
    """A browser without scripts."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self._cookies: dict[str, str] = {}

    @property
    def cookie(self) -> str:
        """What it was given, as a header."""
        return "; ".join(f"{name}={value}" for name, value in self._cookies.items() if value)

    def _keep(self, response: HTTPResponse) -> None:
        for given in response.headers.get_all("set-cookie") or ():
            name, _, value = given.partition(";")[0].partition("=")
            self._cookies[name] = value

    def get(self, path: str, **headers: str) -> tuple[HTTPResponse, Text]:
        response, body = self.gateway.call("GET", path, headers={"cookie": self.cookie, **headers})
        self._keep(response)
        return response, Text(body)

    def page(self, path: str) -> Text:
        response, text = self.get(path)
        assert response.status == 200, (response.status, text.text)
        return text

    def post(self, path: str, site: str = "same-origin", **form: object) -> tuple[HTTPResponse, Text]:
        """The answer, without following a redirect."""
        headers = {"content-type": "application/x-www-form-urlencoded", "cookie": self.cookie}
        if site:
            headers["sec-fetch-site"] = site
        response, body = self.gateway.call("POST", path, urlencode(form).encode(), headers)
        self._keep(response)
        return response, Text(body)

    def follow(self, path: str, **form: object) -> Text:
        """Sends a form, and returns the page that follows."""
        response, text = self.post(path, "same-origin", **form)
        assert response.status == 303, (response.status, text.text)
        return self.page(response.headers["location"])


@pytest.fixture
def visitor(gateway: GatewayProcess) -> Iterator[Visitor]:
    yield Visitor(gateway)
