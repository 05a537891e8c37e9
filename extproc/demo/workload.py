"""A seeded multi-turn chat workload: several tenants with shared system prompts, conversations that grow.

Decides what is asked and when, never where it goes: the same object drives every strategy, so that rows of a comparison
differ in routing alone. The assistant's turns are part of the workload (not what a model server happened to answer), so
that the prompts are equal byte for byte in each run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["ChatSpec", "ChatWorkload", "Session", "Turn", "make_chat"]

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
).split()


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """Shape of a chat workload. Token counts are means; texts have about four bytes per token."""

    seed: int = 1
    tenants: int = 6
    """Groups of sessions that share a system prompt."""
    sessions: int = 60
    turns: int = 5
    """Requests per session; each carries the whole conversation so far."""
    system_tokens: int = 600
    user_tokens: int = 250
    """What the user says in one turn."""
    opening_tokens: int | None = None
    """What the user says first, where that is of another length: a text to be talked about. None: `user_tokens`."""
    reply_tokens: int = 60
    """Tokens generated per request, and the length of the assistant's turn in the next prompt."""
    arrival_s: float = 12.0
    """Sessions start evenly at random within this time."""
    think_s: float = 1.0
    """Mean pause between an answer and the next question."""

    @property
    def requests(self) -> int:
        """Requests of the whole workload."""
        return self.sessions * self.turns


@dataclass(frozen=True, slots=True)
class Turn:
    """One question: what the user says, what the assistant is taken to have answered, and the pause before it."""

    user: str
    reply: str
    max_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation."""

    tenant: int
    system: str
    start_s: float
    turns: tuple[Turn, ...]

    def messages(self, turn: int) -> list[dict[str, str]]:
        """Return the chat messages of request `turn` (0-based): system, all earlier turns, the new question."""
        messages = [{"role": "system", "content": self.system}]
        for earlier in self.turns[:turn]:
            messages += [{"role": "user", "content": earlier.user}, {"role": "assistant", "content": earlier.reply}]
        return [*messages, {"role": "user", "content": self.turns[turn].user}]


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """All sessions, in order of their start."""

    spec: ChatSpec
    sessions: tuple[Session, ...]


def make_chat(spec: ChatSpec) -> ChatWorkload:
    """Make the workload of a spec; equal specs give equal workloads on every machine and Python version."""
    rng = random.Random(spec.seed)
    systems = [f"You are assistant {tenant}. " + _text(rng, spec.system_tokens) for tenant in range(spec.tenants)]
    later = spec.user_tokens
    opening = later if spec.opening_tokens is None else spec.opening_tokens
    sessions = []
    for number in range(spec.sessions):
        tenant = rng.randrange(spec.tenants)
        turns = tuple(
            Turn(
                user=f"[{number}.{turn}] " + _text(rng, round((later if turn else opening) * (0.5 + rng.random()))),
                reply=_text(rng, spec.reply_tokens),
                max_tokens=max(1, round(spec.reply_tokens * (0.5 + rng.random()))),
                think_s=spec.think_s * (0.5 + rng.random()),
            )
            for turn in range(spec.turns)
        )
        sessions.append(Session(tenant, systems[tenant], rng.random() * spec.arrival_s, turns))
    return ChatWorkload(spec, tuple(sorted(sessions, key=lambda session: session.start_s)))


def _text(rng: random.Random, tokens: int) -> str:
    """Return about four bytes of words per token."""
    wanted = tokens * 4
    words: list[str] = []
    length = 0
    while length < wanted:
        word = _WORDS[int(rng.random() * len(_WORDS))]
        words.append(word)
        length += len(word) + 1
    return " ".join(words)
