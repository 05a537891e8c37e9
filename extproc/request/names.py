"""Names that clients send (models, users, sessions, salts, request ids), shortened to a length that can be kept.

What is remembered of a request after its decision consists of such names, and a client may send one of megabytes. Applied
where a request is read, so that no other module has to limit them.
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

    Different names stay different, so they separate prompts and sessions as before; but a shortened name is not the
    name of a model that an endpoint serves.
    """
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:_KEPT]}#{xxhash.xxh3_128_hexdigest(name.encode('utf-8', 'surrogatepass'))}"
