"""Short ways to say what a test is about; everything not named has a harmless value."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from extproc.types import Endpoint, EndpointSnapshot, InferenceRequest, PrefixMatch, RequestKind

NOW = 1000.0


def request(**fields: Any) -> InferenceRequest:
    return InferenceRequest(**{"kind": RequestKind.CHAT, "prompts": (b"p" * 100,), **fields})


def seen(number: int, *, address: str = "", port: int = 8000, **fields: Any) -> EndpointSnapshot:
    """An endpoint scraped just now and idle, but for `fields`."""
    idle = {"observed_at": NOW, "waiting": 0.0, "running": 0.0, "kv_cache_usage": 0.0}
    return EndpointSnapshot(endpoint=Endpoint(address or f"10.0.0.{number}", port), **{**idle, **fields})


def unseen(number: int, **fields: Any) -> EndpointSnapshot:
    """An endpoint that was never scraped."""
    return EndpointSnapshot(endpoint=Endpoint(f"10.0.0.{number}", 8000), **fields)


def match(prompt_bytes: int = 100, **held: int) -> PrefixMatch:
    """`e1=50`: endpoint 10.0.0.1:8000 holds 50 bytes."""
    return PrefixMatch(prompt_bytes, {f"10.0.0.{name[1:]}:8000": size for name, size in held.items()})


_ANY = st.floats(allow_nan=True, allow_infinity=True)
_NAMES = st.frozensets(st.sampled_from(["m", "a", "b", "c"]))


@st.composite
def snapshots(draw: st.DrawFn, *, sane: bool = False) -> list[EndpointSnapshot]:
    """Pools of one to six endpoints; unless `sane` with values that should never occur."""
    value = st.floats(0, 1e6) if sane else _ANY
    usage = st.floats(0, 1) if sane else _ANY
    age = st.floats(0, 1e5) if sane else st.floats(-1e9, 1e9)
    count = st.integers(0, 10**6) if sane else st.integers(-(10**12), 10**12)
    return [
        EndpointSnapshot(
            endpoint=Endpoint(f"10.0.0.{number}", 8000),
            observed_at=draw(st.none() | age.map(lambda seconds: NOW - seconds)),
            waiting=draw(st.none() | value),
            running=draw(st.none() | value),
            kv_cache_usage=draw(st.none() | usage),
            in_flight=draw(count),
            in_flight_tokens=draw(count),
            lora_running=draw(_NAMES),
            lora_waiting=draw(_NAMES),
            lora_max=draw(st.none() | st.integers(0, 4)),
            models=draw(st.none() | _NAMES),
            demoted=draw(st.booleans()),
        )
        for number in range(1, draw(st.integers(1, 6)) + 1)
    ]
