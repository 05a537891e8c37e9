"""Which fault comes when, for how long and to whom: all of it drawn from a seed before the run begins.

The same seed, length and number of pickers always give the same list. Decides nothing about how a fault is acted out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["ENGINES", "KINDS", "Fault", "Group", "Kind", "Times", "draw", "times_of"]

ENGINES: Final = 8
_MOST_BROKEN: Final = 6
"""So many engines at once may answer badly: with all of them broken there is nothing to compare."""
_BETWEEN_S: Final = (0.6, 3.0)
"""From the start of one fault to the start of the next."""
_STACKED: Final = 0.25
"""Share of engine faults that come on top of one that an engine has already."""


class Group(Enum):
    """Whom a fault befalls. One of PICKER, POOL and PROXY is under way at a time, any number of the others."""

    ENGINE = "engine"
    METRICS = "metrics page"
    PICKER = "picker"
    CONFIG = "configuration"
    POOL = "endpoints file"
    PROXY = "Envoy"
    CLIENT = "clients"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault: how long it lasts, and how often it is dealt beside the others."""

    name: str
    group: Group
    seconds: tuple[float, float]
    cards: int = 1
    """In each round of the deck."""
    spacing_s: float = 0.0
    """Rest after its end before the next of its group."""
    pickers: int = 0
    """Only in runs with that many pickers; 0: in all."""
    variants: int = 1
    """Forms it takes, told apart by `Fault.variant`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a run. Times in seconds from the start of the run."""

    at_s: float
    seconds: float
    kind: Kind
    engines: tuple[int, ...] = ()
    """Which of them (from 0); of the endpoints file, which entries."""
    variant: int = 0
    strength: float = 0.5
    """0 to 1: what a kind makes of it stands where it is acted out."""

    @property
    def end_s(self) -> float:
        """When it is over."""
        return self.at_s + self.seconds

    def line(self) -> str:
        """Describe it in one line."""
        whom = f" engines {', '.join(str(one + 1) for one in self.engines)}" if self.engines else ""
        which = f" form {self.variant + 1}" if self.kind.variants > 1 else ""
        return f"{self.at_s:7.1f} s  {self.kind.name:<18} for {self.seconds:4.1f} s{whom}{which}"


def _kinds() -> Iterable[Kind]:
    engine, metrics, client = Group.ENGINE, Group.METRICS, Group.CLIENT
    for name, cards in {"error-500": 2, "error-503": 2, "error-404": 1, "error-401": 1, "error-429": 1}.items():
        yield Kind(name, engine, (3, 10), cards)
    yield Kind("hang", engine, (2, 6))
    yield Kind("slow-start", engine, (3, 8))
    yield Kind("slow-stream", engine, (3, 8))
    yield Kind("break-off-reset", engine, (3, 8))
    yield Kind("break-off-close", engine, (3, 8))
    yield Kind("reset", engine, (3, 8))
    yield Kind("restart", engine, (0.1, 2.0), 2)
    yield Kind("away", engine, (3, 8))
    yield Kind("metrics-lost", metrics, (4, 12), variants=3)
    yield Kind("metrics-hang", metrics, (4, 12))
    yield Kind("metrics-nonsense", metrics, (4, 12), 2, variants=8)
    yield Kind("picker-kill", Group.PICKER, (0.1, 1.5), 2, spacing_s=10)
    yield Kind("picker-restart", Group.PICKER, (0, 0), spacing_s=10)
    yield Kind("picker-beside", Group.PICKER, (0, 0), spacing_s=10)
    yield Kind("picker-hup", Group.PICKER, (1, 1), spacing_s=4)
    yield Kind("config-good", Group.CONFIG, (4, 12), 2, spacing_s=3, variants=6)
    yield Kind("config-bad", Group.CONFIG, (2, 5), 2, spacing_s=3, variants=6)
    yield Kind("endpoints-leave", Group.POOL, (0.8, 4), 2, spacing_s=3)
    yield Kind("endpoints-garbage", Group.POOL, (1, 4), spacing_s=3, variants=5)
    yield Kind("endpoints-missing", Group.POOL, (1, 4), spacing_s=3)
    yield Kind("endpoints-none", Group.POOL, (2, 3), spacing_s=8)
    yield Kind("endpoints-renamed", Group.POOL, (2, 4), spacing_s=3)
    yield Kind("envoy-replaced", Group.PROXY, (8, 8), spacing_s=15)
    yield Kind("cut-upload", client, (3, 8))
    yield Kind("cut-answer", client, (3, 8))
    yield Kind("garbage", client, (3, 8))
    yield Kind("huge", client, (3, 8))
    yield Kind("heavy", client, (3, 8), 2)
    yield Kind("slow-body", client, (4, 10))
    yield Kind("trailers", client, (3, 8))
    yield Kind("all-refused", client, (4, 10))
    yield Kind("idle-sockets", client, (4, 8), variants=3)
    yield Kind("no-http", client, (2, 5))


KINDS: Final = {kind.name: kind for kind in _kinds()}
"""By name."""


@dataclass(frozen=True, slots=True)
class Times:
    """When each part of a run ends, in seconds from its start."""

    warm_s: float
    """Until then nothing is wrong: what the picker's memory is compared with."""
    faults_s: float
    """Faults start and end before."""
    load_s: float
    """Between: everything heals, under load."""


def times_of(minutes: float) -> Times:
    """Divide a run: a short one has less of everything, a full one half a minute to heal before its last ten seconds."""
    seconds = minutes * 60
    warm_s = min(15.0, seconds * 0.15)
    heal_s = min(40.0, seconds * 0.3)
    return Times(warm_s, seconds - heal_s, seconds)


class _Deck:
    """Kinds in random order, each as often as it has cards; dealt again when none is left."""

    def __init__(self, rng: random.Random, kinds: Sequence[Kind]) -> None:
        self._rng = rng
        self._all = [kind for kind in kinds for _ in range(kind.cards)]
        self._left: list[Kind] = []

    def deal(self, free_s: dict[Group, float], now: float) -> Kind:
        """Return the next kind whose group is free; those passed over come next time."""
        while True:
            for place, kind in enumerate(self._left):
                if free_s.get(kind.group, 0.0) <= now:
                    return self._left.pop(place)
            fresh = self._all[:]
            self._rng.shuffle(fresh)
            self._left += fresh


def draw(seed: int, times: Times, *, pickers: int = 1, only: Sequence[str] = ()) -> list[Fault]:
    """Draw the faults of a run, in order of their start. `only`: names of kinds, for a run of nothing else."""
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS.values() if kind.pickers in {0, pickers} and (not only or kind.name in only)]
    deck = _Deck(rng, kinds)
    faults: list[Fault] = []
    free_s: dict[Group, float] = {}
    now = times.warm_s
    while True:
        if all(free_s.get(kind.group, 0.0) > now for kind in kinds):
            now = min(free_s[kind.group] for kind in kinds)
        kind = deck.deal(free_s, now)
        fault = _one(rng, kind, now, faults, times.faults_s)
        if fault is not None:
            if now + 0.1 > times.faults_s or fault.end_s > times.faults_s:
                return faults
            faults.append(fault)
            if kind.group in {Group.PICKER, Group.CONFIG, Group.POOL, Group.PROXY}:
                free_s[kind.group] = fault.end_s + kind.spacing_s
        now += rng.uniform(*_BETWEEN_S)
        if now >= times.faults_s:
            return faults


def _one(rng: random.Random, kind: Kind, now: float, before: Sequence[Fault], end_s: float) -> Fault | None:
    """Draw one fault of a kind; None where every engine that may break is broken already."""
    seconds = min(rng.uniform(*kind.seconds), max(0.0, end_s - now))
    engines: tuple[int, ...] = ()
    if kind.group in {Group.ENGINE, Group.METRICS}:
        running = {
            one for fault in before if fault.end_s > now and fault.kind.group is kind.group for one in fault.engines
        }
        count = rng.choices((1, 2, 3, 5), (5, 3, 2, 1))[0]
        if running and rng.random() < _STACKED:
            engines = tuple(sorted(rng.sample(sorted(running), min(count, len(running)))))
        else:
            room = _MOST_BROKEN - len(running)
            free = sorted(set(range(ENGINES)) - running)
            if room < 1:
                return None
            engines = tuple(sorted(rng.sample(free, min(count, room))))
    elif kind.group is Group.POOL:
        engines = tuple(sorted(rng.sample(range(ENGINES), rng.choice((1, 1, 2, 4)))))
    return Fault(round(now, 2), round(seconds, 2), kind, engines, rng.randrange(kind.variants), round(rng.random(), 3))
