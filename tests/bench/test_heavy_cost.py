from __future__ import annotations

import pytest

from bench import heavy_cost
from bench.heavy_bodies import Heavy


def test_the_worst_are_told_worst_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(*, cut: bool = True, twice: bool = True) -> list[Heavy]:
        chat = "/v1/chat/completions"
        found = [
            Heavy("text", chat, lambda size: b'{"messages":[{"role":"user","content":"' + b"x" * (size // 2) + b'"}]}'),
            Heavy("messages", chat, lambda size: b'{"messages":[' + b"{}," * (size // 3 - 10) + b"{}]}"),
        ]
        return found + [found[0]._replace(name="text, cut", complete=False)] * cut

    monkeypatch.setattr(heavy_cost, "heavy_bodies", some)
    measured = heavy_cost.measure(quick=True)
    told = heavy_cost.lines(measured["figures"])
    assert len(told) >= 2
    times = [float(line.split()[0]) for line in told]
    assert times == sorted(times, reverse=True)
    assert measured["aims"][0]["measured"] == times[0] > 0
    assert any("4 MiB" in line for line in told)
