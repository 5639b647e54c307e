"""Access tokens: "mgpu_<token_id>_<secret>".

The journal keeps the SHA-256 of the secret. The secret has 256 random bits, so it needs no slow, salted hash.
"""

import asyncio
import dataclasses
import hashlib
import hmac
import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from multigpu_master.errors import PARSE_ERRORS, ExhaustedError, damaged_setting_error

SUBMIT, READ, WORKER, ADMIN = "submit", "read", "worker", "admin"
ROLES = (SUBMIT, READ, WORKER, ADMIN)
SETTING_PREFIX = "token/"
TOKENS_MAX = 10_000
ENTRIES_MAX = 100  # limit of the queues, or of the worker_ids, of a token
NAME_BYTES_MAX = 256
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
# Fields that the journal's JSON has without conversion.
_PLAIN_FIELDS = ("name", "worker_ids", "create_s", "expire_s", "tasks_per_s", "calls_max")
_TOKEN = re.compile(r"mgpu_([0-9a-f]{12})_([0-9a-f]{64})")


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Token:
    """A caller's identity and limits. Times are seconds since 1970."""

    token_id: str
    name: str
    roles: frozenset[str]
    queues: frozenset[str] | None  # None: all
    worker_ids: tuple[str, ...]  # (): all; "prefix*" for all that begin with it
    create_s: float
    expire_s: float | None  # None: never
    tasks_per_s: float  # 0: no limit
    calls_max: int  # of open calls; 0: the master's token_calls_max
    digest: bytes  # SHA-256 of the secret
    # The calls with this token that have not ended.
    open_calls: set["asyncio.Task[Any]"] = dataclasses.field(default_factory=set)
    # A rate limiter's bucket, in tasks, and when it was last filled. Submits are rejected while it is at most zero.
    _level: float = 0.0
    _level_s: float = 0.0

    def may_use_queue(self, queue: str) -> bool:
        return self.queues is None or queue in self.queues

    def may_use_worker_id(self, worker_id: str) -> bool:
        """Whether a worker with this token may have this id."""
        return not self.worker_ids or any(
            worker_id.startswith(p[:-1]) if p.endswith("*") else worker_id == p for p in self.worker_ids
        )

    def charge(self, tasks: int, now: float) -> float | None:
        """Counts tasks against tasks_per_s. Returns the seconds to wait, or None if the tasks are accepted.

        While the level is positive, a batch of any size is accepted whole, and may make the level negative. So the
        accepted tasks exceed tasks_per_s for a while, but not on average.
        """
        if not self.tasks_per_s:
            return None
        self._level = min(self.tasks_per_s, self._level + (now - self._level_s) * self.tasks_per_s)
        self._level_s = now
        if self._level <= 0:
            return (min(1.0, self.tasks_per_s) - self._level) / self.tasks_per_s
        self._level -= tasks
        return None

    def setting(self) -> dict[str, bytes | None]:
        """The journal's setting of the token."""
        fields = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        fields["roles"] = sorted(self.roles)
        fields["queues"] = None if self.queues is None else sorted(self.queues)
        return {SETTING_PREFIX + self.token_id: json.dumps(fields | {"sha256": self.digest.hex()}).encode()}


class Tokens:
    """All tokens, by token_id. `now`: seconds since 1970."""

    def __init__(self, settings: Mapping[str, bytes], now: Callable[[], float]) -> None:
        """Raises JournalError if a token among the journal's settings is damaged."""
        self.now = now
        self._tokens: dict[str, Token] = {}
        for key, value in settings.items():
            if key.startswith(SETTING_PREFIX):
                try:
                    token = _token_of(key.removeprefix(SETTING_PREFIX), json.loads(value))
                except PARSE_ERRORS as error:
                    raise damaged_setting_error(key, error) from error
                self._tokens[token.token_id] = token

    def find(self, text: str) -> Token | None:
        """Returns the token of this text, or None if it is unknown, was revoked or has expired."""
        match = _TOKEN.fullmatch(text)
        if match is None:
            return None
        token = self._tokens.get(match[1])
        if token is None or not hmac.compare_digest(token.digest, _digest(match[2])):
            return None
        return None if self.expired(token) else token

    def expired(self, token: Token) -> bool:
        return token.expire_s is not None and token.expire_s <= self.now()

    def valid(self) -> list[Token]:
        """The tokens that have not expired, oldest first."""
        return sorted((t for t in self._tokens.values() if not self.expired(t)), key=lambda t: (t.create_s, t.token_id))

    def __iter__(self) -> Iterator[Token]:
        return iter(tuple(self._tokens.values()))

    def make(
        self, name: str, roles: Iterable[str], queues: Iterable[str] = (), worker_ids: Iterable[str] = (),
        *, ttl_s: float | None = None, tasks_per_s: float = 0.0, calls_max: int = 0,
    ) -> tuple[Token, str]:  # fmt: skip
        """Returns a new token, not yet added, and its text. Raises ValueError if an argument is not allowed."""
        roles, queues, worker_ids = frozenset(roles), frozenset(queues), tuple(worker_ids)
        _check(name, roles, queues, worker_ids)
        if ttl_s is not None and ttl_s <= 0:
            raise ValueError(f"ttl is {ttl_s:g} s; it must be more than 0, or absent")
        if not 0 <= tasks_per_s <= 1e9:
            raise ValueError(f"tasks_per_s is {tasks_per_s:g}; use 0 for no limit, or up to 1e9")
        token_id, secret, now = secrets.token_hex(6), secrets.token_hex(32), self.now()
        token = Token(
            token_id=token_id,
            name=name,
            roles=roles,
            queues=queues or None,
            worker_ids=worker_ids,
            create_s=now,
            expire_s=None if ttl_s is None else now + ttl_s,
            tasks_per_s=tasks_per_s,
            calls_max=calls_max,
            digest=_digest(secret),
        )
        return token, f"mgpu_{token_id}_{secret}"

    def check_count(self) -> None:
        """Raises ExhaustedError if there are TOKENS_MAX tokens."""
        if len(self._tokens) >= TOKENS_MAX:
            raise ExhaustedError(f"there are {TOKENS_MAX} tokens already; revoke some")

    def add(self, token: Token) -> None:
        self._tokens[token.token_id] = token

    def remove_expired(self) -> dict[str, bytes | None]:
        """Removes the tokens that have expired. Returns the settings that delete them from the journal."""
        expired: dict[str, bytes | None] = {}
        for token in filter(self.expired, self):
            self.remove(token.token_id)
            expired |= dict.fromkeys(token.setting())
        return expired

    def remove(self, token_id: str) -> Token | None:
        """Removes and returns a token. Returns None if there is no such token."""
        return self._tokens.pop(token_id, None)


def token_id_of(text: str | bytes) -> str | None:
    """Returns the token_id in a token's text, for the log, without a check of the secret. None: not a token."""
    match = _TOKEN.fullmatch(text) if isinstance(text, str) else None
    return None if match is None else match[1]


def _check(name: str, roles: frozenset[str], queues: frozenset[str], worker_ids: tuple[str, ...]) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"a token's name consists of 1 to 64 letters, digits, '.', '_', '-' or '@'; {name!r} does not")
    if not roles or not roles <= set(ROLES):
        raise ValueError(f"a token needs at least one role of {', '.join(ROLES)}")
    if WORKER in roles and len(roles) > 1:
        raise ValueError("a worker's token can have no other role: make two tokens")
    if queues and (ADMIN in roles or WORKER in roles):
        raise ValueError("a token restricted to queues can have only the roles submit and read")
    if worker_ids and WORKER not in roles:
        raise ValueError("worker_ids are for tokens of the role worker")
    for what, entries in (("queues", queues), ("worker_ids", worker_ids)):
        if len(entries) > ENTRIES_MAX:
            raise ValueError(f"{len(entries)} {what}; at most {ENTRIES_MAX} are allowed")
        if not all(0 < len(e.encode()) <= NAME_BYTES_MAX for e in entries):
            raise ValueError(f"each of {what} must have 1 to {NAME_BYTES_MAX} bytes")


def _token_of(token_id: str, fields: dict[str, Any]) -> Token:
    roles, queues, worker_ids = frozenset(fields["roles"]), fields["queues"], tuple(fields["worker_ids"])
    _check(fields["name"], roles, frozenset(queues or ()), worker_ids)
    numbers = fields["create_s"], fields["expire_s"] or 0.0, fields["tasks_per_s"], fields["calls_max"]
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"{numbers} are not all finite")
    return Token(
        **{name: fields[name] for name in _PLAIN_FIELDS} | {"worker_ids": worker_ids},
        token_id=token_id,
        roles=roles,
        queues=None if queues is None else frozenset(queues),
        digest=bytes.fromhex(fields["sha256"]),
    )


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
