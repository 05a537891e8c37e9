from __future__ import annotations

import time

import pytest

from extproc.edge.scraping.core_share import Wakefulness


def test_the_share_of_the_last_tenth_of_a_second() -> None:
    now, cpu_s = 50.0, 7.0
    awake = Wakefulness(lambda: now, lambda: cpu_s)
    assert awake.share() == 0.0
    now, cpu_s = 50.05, 7.05
    assert awake.share() == 0.0, "too short to say anything"
    now, cpu_s = 50.2, 7.06
    assert awake.share() == pytest.approx(0.3)
    now, cpu_s = 51.2, 7.06
    assert awake.share() == 0.0
    now, cpu_s = 52.2, 9.0
    assert awake.share() == 1.0


def test_by_default_it_is_this_thread() -> None:
    now = 0.0
    awake = Wakefulness(lambda: now)
    while time.thread_time() - awake._cpu_since < 0.01:
        pass
    now = 1.0
    assert awake.share() >= 0.01
