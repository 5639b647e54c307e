"""Rules for names and sizes in messages, shared by the program that sends them and the one that checks them."""

import re

# Bytes of a model's id, of its name and of its version.
MODEL_BYTES_MAX = 256
# Total size of a worker's hello without its leases, and of its catalog; number of models in one.
HELLO_BYTES_MAX, MODELS_MAX = 128 << 10, 1000
# Control characters, characters that are invisible or change how the text around them is displayed, and surrogates,
# which no message can hold.
UNPRINTABLE = re.compile(
    "[\0-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def escaped(text: str) -> str:
    """The text with its unprintable characters as Python writes them."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
