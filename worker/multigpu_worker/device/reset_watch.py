"""Detects whether a device that needs a reset (or a restart of its host) has had one.

The driver announces a needed reset once. Not every driver repeats that, or announces the reset itself. A reset has
happened if the driver had lost the device or required a recovery action and no longer does. A correct self-test proves
nothing, nor does an error count of 0, which a reload of the driver causes. The state is kept in a file for the next
process of the worker; after a restart of the host the file is ignored.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FILE_BYTES_MAX = 65_536

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResetState:
    # Code and message of the first event that needs a reset; None: no reset is needed.
    needed: tuple[str, str] | None = None
    # The device was gone, or its driver required a recovery action.
    driver_blocked: bool = False
    # Uncorrectable errors since the driver was loaded; None: never reported.
    errors: int | None = None


class ResetWatch:
    """Pure."""

    def __init__(self, state: ResetState | None = None) -> None:
        state = state or ResetState()
        self.needed, self._blocked, self._errors = state.needed, state.driver_blocked, state.errors

    @property
    def state(self) -> ResetState:
        return ResetState(self.needed, self._blocked, self._errors)

    def need(self, code: str, message: str) -> None:
        if self.needed is None:
            self.needed = code, message

    def look(self, *, driver_blocked: bool | None, ecc_uncorrected: int | None) -> int:
        """Update from a sample; returns the number of new uncorrectable errors.

        `driver_blocked`: the device is gone, or its driver requires a recovery action; None: unknown.
        """
        before, now = self._errors, ecc_uncorrected
        new = 0 if before is None or now is None else now - before
        if self._blocked and driver_blocked is False:
            self.needed = None
        self._blocked = self._blocked if driver_blocked is None else driver_blocked
        self._errors = before if now is None else now
        return max(0, new)


class ResetNote:
    """A file that exists while its device needs a reset. No fsync: a power loss restarts the host anyway."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept = ResetState()
        # The last write failed, and that was logged.
        self._failed = False

    def read(self) -> ResetState:
        """The state stored by an earlier process since the last boot; the default if there is none."""
        try:
            with self.path.open("rb") as file:
                values = json.loads(file.read(FILE_BYTES_MAX))
            if values["boot_id"] == _boot_id():
                code, message = values["needed"]
                errors = None if values["errors"] is None else int(values["errors"])
                self._kept = ResetState((str(code), str(message)), bool(values["driver_blocked"]), errors)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            log.warning("the stored reset state can't be read", file=str(self.path), error=str(error))
        return self._kept

    def keep(self, state: ResetState) -> None:
        """Write the state, or delete the file if no reset is needed. A later call repeats a write that failed."""
        if state == self._kept or state.needed is self._kept.needed is None:
            return
        new = self.path.with_name(f".{self.path.name}.new")
        try:
            if state.needed is None:
                self.path.unlink(missing_ok=True)
            else:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                new.write_text(json.dumps({"boot_id": _boot_id(), **asdict(state)}), encoding="utf-8")
                new.replace(self.path)
            self._kept, self._failed = state, False
        except OSError as error:
            if not self._failed:
                log.warning("the reset state can't be stored", file=str(self.path), error=str(error))
            self._failed = True


def _boot_id() -> str:
    return BOOT_ID.read_text(encoding="ascii").strip()
