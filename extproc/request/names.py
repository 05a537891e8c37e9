"""Names that clients write (models, users, sessions, salts, request ids), at a length that can be kept.

Whatever is remembered of a request after its decision is made of such names, and a client may write one of megabytes.
Decides what becomes of a long one; applied where a request is read, so that nobody further down has to think of it.
"""

from __future__ import annotations

from typing import Final

import xxhash

__all__ = ["LONGEST_NAME", "bounded"]

LONGEST_NAME: Final = 256
"""Characters. Real names are shorter: paths of models have up to a hundred, request ids and salts some forty."""

_KEPT: Final = 64


def bounded(name: str) -> str:
    """Return `name`, or, of one longer than `LONGEST_NAME`, its beginning and a digest of all of it.

    Different names stay different, so they separate prompts and sessions as before; but a long name is none that an
    endpoint is known by.
    """
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:_KEPT]}#{xxhash.xxh3_128_hexdigest(name.encode('utf-8', 'surrogatepass'))}"
