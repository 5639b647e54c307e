"""What goes wrong with a journal."""


class JournalError(Exception):
    """The journal can't be opened or used; the message says what to do."""


class JournalDamagedError(JournalError):
    """The journal does not hold what was written. Trying again does not help."""


class JournalFullError(JournalError):
    """There is no room on the disk, or no file descriptor: nothing was written. Try again later."""
