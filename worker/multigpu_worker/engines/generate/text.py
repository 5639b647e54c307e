"""From tokens to text, piece by piece: what may be handed out already, and whether a stop string has come.

A token may end in the middle of a character, and a stop string may begin in one token and end in another. So text is
held back while it could still become something else: the bytes of a character that is not whole, and an end that is
the beginning of a stop string. What is handed out after n tokens depends on these tokens alone, so that an attempt
that goes on where another one ended comes to the same.
"""

from collections.abc import Callable, Sequence

# What a decoder writes where bytes are not (yet) a character.
REPLACEMENT = "\ufffd"
# Tokens before the first new one that its text may depend on: whether a word begins with a space, say.
CONTEXT_TOKENS = 6
# After so many tokens that are no whole character yet they never will be: models that are lost write bytes without end.
BROKEN_TOKENS = 16


class TextStream:
    """The text of one answer as it grows. `decode`: token ids to text, without special tokens."""

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        # Text is read from `_context` on; that of the tokens before `_read` is known already.
        self._context = 0
        self._read = len(self._ids)
        self._stop = [word for word in stop if word]
        # All whole characters so far; up to the stop string once one has come.
        self._text = ""
        self.stopped = False
        self._handed_out = 0

    @property
    def text(self) -> str:
        return self._text

    def add(self, token: int) -> None:
        """One token more."""
        assert not self.stopped
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._read])
        now = self._decode(self._ids[self._context :])
        whole = not now.endswith(REPLACEMENT) or len(self._ids) - self._read > BROKEN_TOKENS
        if len(now) > len(before) and whole:
            self._grow(now[len(before) :])
            self._context, self._read = self._read, len(self._ids)

    def finish(self) -> None:
        """No more tokens will come: what was held back is text now."""
        if self.stopped:
            return
        before = self._decode(self._ids[self._context : self._read])
        self._grow(self._decode(self._ids[self._context :])[len(before) :])
        self._read = len(self._ids)

    def _grow(self, more: str) -> None:
        # A stop string that ends in the new text began this far back at most.
        start = max(0, len(self._text) - max(map(len, self._stop), default=1) + 1)
        self._text += more
        found = [at for word in self._stop if (at := self._text.find(word, start)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def take(self, *, ended: bool) -> str:
        """What may be handed out and wasn't yet. `ended`: nothing more will come, so nothing is held back."""
        end = len(self._text) if ended or self.stopped else len(self._text) - self._held()
        piece = self._text[self._handed_out : end]
        self._handed_out = max(self._handed_out, end)
        return piece

    def _held(self) -> int:
        """How many characters at the end are the beginning of a stop string."""
        longest = 0
        for word in self._stop:
            for length in range(min(len(word) - 1, len(self._text)), longest, -1):
                if self._text.endswith(word[:length]):
                    longest = length
                    break
        return longest
