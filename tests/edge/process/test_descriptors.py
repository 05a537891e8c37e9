from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from extproc.edge.process import descriptors
from extproc.edge.process.descriptors import Reserve, Shares, raise_limit


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one_within_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    monkeypatch.setattr(descriptors, "_MOST", 600)
    assert raise_limit() == 600
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, hard)
    monkeypatch.setattr(descriptors, "_MOST", 550)
    assert raise_limit() == 600, "never lowered"


def test_where_it_cannot_be_raised_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_limit() == 500
    monkeypatch.undo()


@pytest.mark.parametrize("limit", [16, 64, 100, 256, 1024, 4096, 65_536])
@pytest.mark.parametrize("max_connections", [1, 1000, 100_000])
def test_all_shares_fit_into_the_limit(limit: int, max_connections: int) -> None:
    shares = Shares.of(limit, max_connections)
    ports = (shares.grpc, shares.health, shares.metrics, shares.admin)
    assert min(ports) >= 1
    assert sum(ports) + shares.reserve + shares.endpoints <= limit - min(64, limit // 4)
    assert shares.grpc <= max_connections


def test_a_usual_limit_is_enough_and_a_small_one_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    usual, small = Shares.of(20_000, 1000), Shares.of(256, 1000)
    usual.warn(1000)
    usual.warn_of_endpoints(1000)
    small.warn_of_endpoints(small.endpoints)
    assert (usual.grpc, caplog.records) == (1000, [])
    small.warn(1000)
    small.warn_of_endpoints(small.endpoints + 1)
    assert ["ulimit -n" in record.message for record in caplog.records] == [True, True]


def test_a_reserve_is_given_one_by_one_and_filled_again() -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    before = held()
    reserve = Reserve(3)
    assert (held() - before, reserve.full) == (3, True)
    assert reserve.release()
    assert (held() - before, reserve.full) == (2, False)
    reserve.refill()
    assert (held() - before, reserve.full) == (3, True)
    reserve.close()
    assert (held() - before, reserve.release()) == (0, False)
    reserve.refill()
    assert held() == before


def test_a_reserve_that_cannot_be_had_is_filled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    reserve = Reserve(2)
    assert not reserve.full
    assert not reserve.release()
    monkeypatch.setattr(os, "open", opened)
    reserve.refill()
    assert reserve.full
    reserve.close()
