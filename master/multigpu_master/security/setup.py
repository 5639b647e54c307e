"""Sets up authentication when a master starts, and writes the first administrator's token."""

import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import structlog
from multigpu.config.config import MasterConfig

from multigpu_master.security.auth import Auth
from multigpu_master.security.tokens import ADMIN, Tokens

log = structlog.get_logger()

ADMIN_TOKEN_FILE, ADMIN_TOKEN_NAME = "admin.token", "bootstrap"

Save = Callable[[dict[str, bytes | None]], Awaitable[None]]


async def load_auth(
    config: MasterConfig, settings: Mapping[str, bytes], now: Callable[[], float], save: Save
) -> Auth | None:
    """Returns authentication with the journal's tokens, or None if callers need neither token nor certificate.

    Deletes expired tokens. Raises JournalError if a token is damaged or cannot be written, and OSError if the file of
    the first token cannot be read or written.
    """
    tokens = Tokens(settings, now) if config.require_tokens else None
    if tokens is not None:
        if expired := tokens.remove_expired():
            await save(expired)
        await _ensure_admin_token(tokens, config.data_dir / ADMIN_TOKEN_FILE, save)
    if tokens is None and not config.tls_client_ca:
        return None
    return Auth(tokens, certificates=bool(config.tls_client_ca), calls_max=config.token_calls_max)


async def _ensure_admin_token(tokens: Tokens, path: Path, save: Save) -> None:
    """If the file has no valid administrator's token, writes a new token named ADMIN_TOKEN_NAME to it, and revokes all
    earlier tokens with this name. A user who can read the file can also change the journal, so the token gives no
    further access.
    """
    current = tokens.find(_read_secret(path))
    if current is not None and ADMIN in current.roles:
        return
    deletions: dict[str, bytes | None] = {}
    for old in [t for t in tokens if t.name == ADMIN_TOKEN_NAME]:
        tokens.remove(old.token_id)
        deletions |= dict.fromkeys(old.setting())
    token, text = tokens.make(ADMIN_TOKEN_NAME, [ADMIN])
    tokens.add(token)
    await save(deletions | token.setting())
    _write_secret(path, text)
    log.info("an administrator's token was written", path=str(path), token_id=token.token_id)


def _read_secret(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (FileNotFoundError, ValueError):
        return ""


def _write_secret(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
