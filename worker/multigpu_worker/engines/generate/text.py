"""Incremental decoding: which text may be sent after each token, and whether a stop string has occurred.

A token may end within a character, and a stop string may span tokens. So incomplete characters, and an end that may be
the beginning of a stop string, are held back. The text after n tokens depends on these tokens only, so an attempt that
continues another one sends the same.
"""

from collections.abc import Callable, Sequence

# Decoders write it for bytes that are not (yet) a character.
REPLACEMENT = "\ufffd"
# Tokens before the first new one that its text may depend on, such as whether a word begins with a space.
CONTEXT_TOKENS = 6
# More tokens without a complete character never become one: the model writes random bytes.
BROKEN_TOKENS = 16


class TextStream:
    """The text of one sequence. `decode`: token ids to text, without special tokens."""

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        # ids[_context:] are decoded; the text of ids[:_read] is in `_text` already.
        self._context = 0
        self._read = len(self._ids)
        self._stop = [word for word in stop if word]
        # All complete characters, up to the stop string if there is one.
        self._text = ""
        self.stopped = False
        self._handed_out = 0

    @property
    def text(self) -> str:
        return self._text

    def add(self, token: int) -> None:
        """Add a token."""
        assert not self.stopped
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._read])
        now = self._decode(self._ids[self._context :])
        whole = not now.endswith(REPLACEMENT) or len(self._ids) - self._read > BROKEN_TOKENS
        if len(now) > len(before) and whole:
            self._grow(now[len(before) :])
            self._context, self._read = self._read, len(self._ids)

    def finish(self) -> None:
        """Take the text that was held back: there are no more tokens."""
        if self.stopped:
            return
        before = self._decode(self._ids[self._context : self._read])
        self._grow(self._decode(self._ids[self._context :])[len(before) :])
        self._read = len(self._ids)

    def _grow(self, more: str) -> None:
        # A stop string that ends in the new text begins here at the earliest.
        start = max(0, len(self._text) - max(map(len, self._stop), default=1) + 1)
        self._text += more
        found = [at for word in self._stop if (at := self._text.find(word, start)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def take(self, *, ended: bool) -> str:
        """Return the text to send next. `ended`: hold nothing back."""
        end = len(self._text) if ended or self.stopped else len(self._text) - self._held()
        piece = self._text[self._handed_out : end]
        self._handed_out = max(self._handed_out, end)
        return piece

    def _held(self) -> int:
        """The number of characters at the end that may be the beginning of a stop string."""
        longest = 0
        for word in self._stop:
            for length in range(min(len(word) - 1, len(self._text)), longest, -1):
                if self._text.endswith(word[:length]):
                    longest = length
                    break
        return longest
