from __future__ import annotations

from extproc.http2.limits import TokenBucket


def test_what_is_spent_comes_back_with_time_and_with_work() -> None:
    bucket = TokenBucket(2, 1.0, now=0.0)
    assert bucket.spend(0.0, 2)
    assert not bucket.spend(0.0)
    bucket.tokens += 5
    assert bucket.spend(0.0)
    assert bucket.spend(100.0, 2)
    assert not bucket.spend(100.0)
