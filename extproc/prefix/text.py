"""The kind of a prompt's text, and its length in bytes of plain text; fast enough for every request.

A tokenizer makes a token of about four bytes of prose, but of one digit, and of one or two letters of base64. So the
length is weighed: each byte counts as many bytes of plain text as it usually makes tokens. The error of these weights is
similar for all texts of one kind, whatever the tokenizer; `tokens` learns it per kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

__all__ = ["IDS", "KINDS", "Text", "measure"]

SHORT, PLAIN, LATIN, MARKUP, DIGITS, CAPITALS, BLANK, TWO_BYTE, WIDE, IDS = range(10)
"""Too short to be sampled; letters; the same with accents and umlauts; code and the like; numbers and hex; base64; white
space; Cyrillic and others of two bytes a letter; Chinese and others of three and more; token ids, which are exact."""
KINDS: Final = 10

_LOWER: Final = bytes(range(0x61, 0x7B))
_BLANK: Final = b" \t\n\r"
_DIGITS: Final = b"0123456789"
_UPPER: Final = bytes(range(0x41, 0x5B))
_CONTINUATION: Final = bytes(range(0x80, 0xC0))
_LEAD: Final = bytes(range(0xC2, 0xF5))
_TOKEN_IDS: Final = b"\xf9"
_MEDIA: Final = b"\xf5"
"""`TOKENS` and `OTHER` of `request.canonical`: four bytes an id; images and whatever else is no text."""

_SHORT_BYTES: Final = 1024
_STRIDES: Final = (5, 7, 13, 29, 59, 113, 229, 457, 919, 1831, 3671, 7333)
"""By doublings of 2 kB: 200 to 600 bytes are sampled. Primes, so that no encoding of letters, and hardly any table of
lines equally long, shows the same column each time."""
_MAX_PROMPTS: Final = 32


class Text(msgspec.Struct, frozen=True, gc=False):
    """One prompt (or all prompts of a request together), as far as its tokens depend on it."""

    kind: int
    n_bytes: int
    plain_bytes: float
    """Bytes of plain text that take as many tokens; of token ids: the tokens."""
    teaches: bool
    """False where the tokens of the prompt are not those of its text alone (images), or known without learning."""
    prompts: int = 1
    sample: bytes = b""
    """Every `stride`-th byte; empty for short prompts."""
    stride: int = 1
    weight: float = 0.0
    """Plain bytes of the sample, letters at random counted as letters."""
    extra: float = 0.0
    """What letters at random are worth beyond that."""

    def share(self, n_bytes: int) -> float:
        """Return the share of the tokens that the first `n_bytes` bytes have, 0 to 1."""
        if n_bytes >= self.n_bytes:
            return 1.0
        sample = self.sample
        if not sample or self.prompts > 1:
            return n_bytes / self.n_bytes
        at = n_bytes // self.stride
        # The shorter part is looked at; the other is what it leaves of the whole.
        first = 2 * at < len(sample)
        _, weight, extra = _weigh(sample[:at] if first else sample[at:])
        part = weight + extra
        whole = part + (self.weight - weight) + max(0.0, self.extra - extra)
        if whole <= 0:
            return n_bytes / self.n_bytes
        return part / whole if first else 1.0 - part / whole


def measure(prompts: Sequence[bytes]) -> Text:
    """Return the text of a request's prompts, of which there is at least one. Long ones are sampled: O(1)."""
    prompt = prompts[0]
    n_prompts = len(prompts)
    n_bytes = len(prompt)
    if n_bytes < _SHORT_BYTES and n_prompts == 1 and prompt[:1] != _TOKEN_IDS:
        return Text(SHORT, n_bytes, float(n_bytes), _MEDIA not in prompt)
    if n_prompts > 1:
        n_bytes = sum(map(len, prompts))
        if prompt[:1] != _TOKEN_IDS:
            prompt = b"".join(prompts[:_MAX_PROMPTS])
    size = len(prompt)
    if prompt[:1] == _TOKEN_IDS:
        return Text(IDS, n_bytes, float(max(0, n_bytes - n_prompts) // 4), False, n_prompts)
    teaches = n_prompts == 1 and _MEDIA not in prompt
    if size < _SHORT_BYTES:
        return Text(SHORT, n_bytes, float(n_bytes), teaches, n_prompts)
    stride = _STRIDES[min((size >> 11).bit_length(), len(_STRIDES) - 1)]
    sample = prompt[::stride]
    kind, weight, extra = _weigh(sample)
    plain = (weight + extra) * (n_bytes / len(sample))
    return Text(kind, n_bytes, plain, teaches, n_prompts, sample, stride, weight, extra)


def _weigh(sample: bytes) -> tuple[int, float, float]:
    """Return kind and plain bytes of a piece of text, and what its letters are worth beyond them if they are at random.

    Each deletion leaves less for the next one to look at.
    """
    n = len(sample)
    rest = sample.translate(None, _LOWER)
    n_rest = len(rest)
    rest = rest.translate(None, _BLANK)
    n_dark = len(rest)
    rest = rest.translate(None, _DIGITS)
    n_text = len(rest)
    rest = rest.translate(None, _UPPER)
    marks = len(rest)
    blank, digits, upper = n_rest - n_dark, n_dark - n_text, n_text - marks
    following = leads = 0
    if not rest.isascii():
        ascii_and_leads = rest.translate(None, _CONTINUATION)
        following = marks - len(ascii_and_leads)
        marks = len(ascii_and_leads.translate(None, _LEAD))
        leads = len(ascii_and_leads) - marks
    extra = 0.0
    plain = n - n_rest + 0.5 * blank + 5.0 * digits + 1.8 * upper + 2.6 * marks + 1.5 * following
    if following > 0.2 * n:
        kind = WIDE if following > 1.5 * leads else TWO_BYTE
    elif upper > 0.22 * n and digits < 0.35 * n:
        # Not the capitals of names and sentences, but letters at random: each is nearly a token.
        kind = CAPITALS
        extra = 3.2 * upper
    elif digits > 0.2 * n:
        kind = DIGITS
    elif blank > 0.45 * n:
        kind = BLANK
    elif marks > 0.15 * n:
        kind = MARKUP
    elif following > 0.006 * n:
        kind = LATIN
    else:
        kind = PLAIN
    return kind, plain, extra
