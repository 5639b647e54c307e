"""Posts the outcomes of tasks to a URL, as https://www.standardwebhooks.com specifies.

Each outcome is delivered at least once, in the order of GET /v1/outcomes: the next is sent after the receiver has
accepted the one before. A file has the cursor of the last accepted outcome, where the next start continues.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import time
from contextlib import aclosing
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import httpx2
import msgspec
import structlog
from multigpu import errors
from multigpu._transport.credentials import is_loopback, read_secret
from multigpu.config.config import ConfigError, GatewayConfig
from multigpu.daemon.files import replace_file
from multigpu.outcome import Outcome

from multigpu_gateway.clients import Clients
from multigpu_gateway.rest.errors import GONE
from multigpu_gateway.rest.values import outcome_dict

log = structlog.get_logger()

# Limits of one attempt: its duration, and how much of the response is read so that the connection can be used again.
TIMEOUT_S, RESPONSE_BYTES_MAX = 30.0, 64 << 10
# The pause between attempts: doubled after each failure, up to the maximum.
PAUSE_MIN_S, PAUSE_MAX_S = 0.5, 60.0
SECRET_PREFIX, SECRET_BYTES = "whsec_", range(24, 65)
_SETTINGS = ("webhook_url", "webhook_secret_file", "webhook_token_file", "webhook_cursor_file", "webhook_queue")


class _GoneError(Exception):
    """The receiver responded 410: it wants no more outcomes."""


def webhooks_of(config: GatewayConfig) -> "Webhooks | None":
    """Returns None if no webhook setting is given. Raises ConfigError if one can't be used or the URL is missing."""
    if config.webhook_url:
        return Webhooks(config)
    given = next((name for name in _SETTINGS if getattr(config, name)), None)
    if given is not None:
        raise ConfigError(f"{given} needs webhook_url")
    return None


class Webhooks:
    """Posts outcomes to config.webhook_url. Raises ConfigError if a setting can't be used."""

    def __init__(self, config: GatewayConfig) -> None:
        _check_url(config)
        if not config.webhook_secret_file or not config.webhook_cursor_file:
            raise ConfigError("webhook_url needs webhook_secret_file and webhook_cursor_file")
        self._config = config
        self._key = _key_of(config.webhook_secret_file)
        self._cursor_file = Path(config.webhook_cursor_file).expanduser()
        try:
            self._cursor = self._cursor_file.read_text("ascii").strip() if self._cursor_file.exists() else ""
            self._save_cursor()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"webhook_cursor_file {self._cursor_file} can't be used: {error}") from error
        self._token()
        self._clients = Clients(config)
        self._failures = 0

    async def run(self) -> None:
        """Posts outcomes, and retries after every error. Returns only if the receiver responds 410."""
        try:
            async with httpx2.AsyncClient(timeout=TIMEOUT_S) as http:
                while True:
                    await self._run_once(http)
                    await self._pause()
        except _GoneError:
            message = "webhooks are off until the next start: the receiver answered 410"
            log.error(message, url=self._config.webhook_url)  # noqa: TRY400  a traceback says no more
        finally:
            await self._clients.close()

    async def _run_once(self, http: httpx2.AsyncClient) -> None:
        """Posts outcomes until an error, and logs it. Raises _GoneError if the receiver responds 410."""
        try:
            await self._follow(http)
        except errors.CursorExpiredError as error:
            self._cursor = ""
            message = "outcomes are missing: webhooks go on with the oldest one that is kept"
            log.error(message, reason=str(error))  # noqa: TRY400  as above
        except (errors.MultigpuError, OSError) as error:
            log.error("webhooks are interrupted", reason=str(error))  # noqa: TRY400  as above
        except _GoneError:
            raise
        except Exception:
            log.exception("webhooks are interrupted")

    async def _follow(self, http: httpx2.AsyncClient) -> NoReturn:
        async with self._clients.acquire(self._token()) as pair:
            watch = pair.client.watch(cursor=self._cursor, queue=self._config.webhook_queue)
            async with aclosing(watch):
                async for outcome, cursor in watch:
                    await self._deliver(http, outcome)
                    self._cursor = cursor
                    await asyncio.to_thread(self._save_cursor)
        raise AssertionError("a watch does not end")

    async def _deliver(self, http: httpx2.AsyncClient, outcome: Outcome) -> None:
        """Posts an outcome until the receiver accepts it. Raises _GoneError if it responds 410."""
        # The finish time distinguishes the outcomes of a task that was requeued after its first one.
        webhook_id = f"{outcome.task_id}-{outcome.message.stages.finish_time.ToNanoseconds()}"
        body = msgspec.json.encode(outcome_dict(outcome))
        while reason := await self._send(http, webhook_id, body):
            log.warning(
                "an outcome was not taken", url=self._config.webhook_url, task_id=str(outcome.task_id), reason=reason
            )
            await self._pause()
        self._failures = 0

    async def _send(self, http: httpx2.AsyncClient, webhook_id: str, body: bytes) -> str:
        """Posts an outcome once. Returns why the receiver did not accept it, "" if it did. Raises _GoneError on 410."""
        now = int(time.time())
        headers = {
            "content-type": "application/json", "webhook-id": webhook_id, "webhook-timestamp": str(now),
            "webhook-signature": self._signature(webhook_id, now, body),
        }  # fmt: skip
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                http.stream("POST", self._config.webhook_url, content=body, headers=headers) as response,
            ):
                size = 0
                async for part in response.aiter_raw():
                    size += len(part)
                    if size > RESPONSE_BYTES_MAX:
                        break
        except TimeoutError:
            return f"no answer within {TIMEOUT_S:g} s"
        except httpx2.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if response.status_code == GONE:
            raise _GoneError
        return "" if response.is_success else f"status {response.status_code}"

    def _signature(self, webhook_id: str, timestamp_s: int, body: bytes) -> str:
        signed = hmac.digest(self._key, f"{webhook_id}.{timestamp_s}.".encode() + body, hashlib.sha256)
        return f"v1,{base64.b64encode(signed).decode()}"

    async def _pause(self) -> None:
        pause_s = min(PAUSE_MAX_S, PAUSE_MIN_S * 2 ** min(self._failures, 10))
        self._failures += 1
        await asyncio.sleep(pause_s)

    def _token(self) -> str:
        file = self._config.webhook_token_file
        return read_secret(file, "token") if file else ""

    def _save_cursor(self) -> None:
        replace_file(self._cursor_file, self._cursor.encode(), 0o600)


def _check_url(config: GatewayConfig) -> None:
    """Raises ConfigError if webhook_url is not an http or https URL, or if outcomes would cross the network unencrypted
    and `insecure` is not set.
    """
    try:
        url = urlsplit(config.webhook_url)
        port = url.port or 0
    except ValueError as error:
        raise ConfigError(f"webhook_url {config.webhook_url!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"webhook_url {config.webhook_url!r} is not https://HOST/PATH")
    if url.scheme == "http" and not config.insecure and not is_loopback(f"{url.hostname}:{port}"):
        raise ConfigError(
            f"outcomes would cross the network to {url.hostname} in the clear: give an https URL, or, on a network "
            "where every host is trusted, add --insecure"
        )


def _key_of(file: str) -> bytes:
    """Returns the key in a secret file. Raises ConfigError if the file can't be read, or has no valid secret."""
    text = read_secret(file, "secret")
    try:
        key = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not text.startswith(SECRET_PREFIX) or len(key) not in SECRET_BYTES:
        raise ConfigError(
            f"{file} has no secret of Standard Webhooks: {SECRET_PREFIX} and the base64 of 24 to 64 random bytes "
            f'(`echo "{SECRET_PREFIX}$(openssl rand -base64 32)"`)'
        )
    return key
