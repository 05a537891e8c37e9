"""Router: the whole core behind one small object. State in, Decision out; no I/O, no clock, no global random.

The gRPC service, the simulator, the benchmark and any program of a user drive this same object. It decides in which
order the rooms are asked, what a Decision changes, and what the end of a request teaches; how prompts become blocks,
how endpoints are scored and how signals are kept is decided in those rooms.

Not safe for threads: every call must come from one thread at a time (each runs to its end without waiting).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from extproc.config.schema import Config
from extproc.pool.ledger import Entry
from extproc.pool.pool import Pool, PoolChange
from extproc.prefix.blocks import BlockSchedule, hash_blocks, seed
from extproc.prefix.index import AddHandle, PrefixIndex
from extproc.prefix.tokens import BytesPerToken
from extproc.routing.scheduler import Scheduler
from extproc.vocabulary import (
    Decision,
    Endpoint,
    EndpointMetrics,
    EndpointSnapshot,
    InferenceRequest,
    Outcome,
    PrefixMatch,
    Usage,
)

__all__ = ["Finished", "Router", "RouterObserver"]
