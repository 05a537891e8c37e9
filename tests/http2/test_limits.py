from __future__ import annotations

from extproc.http2.limits import TokenBucket


def test_what_is_spent_comes_back_with_time_and_with_work() -> None:
    allowance = TokenBucket(2, 1.0, now=0.0)
    assert allowance.spend(0.0, 2)
    assert not allowance.spend(0.0)
    allowance.left += 5
    assert allowance.spend(0.0)
    assert allowance.spend(100.0, 2)
    assert not allowance.spend(100.0)
