from __future__ import annotations

import pytest

from extproc.edge.scraping.cpu_share import ThreadCpuShare


def test_the_share_of_the_last_tenth_of_a_second() -> None:
    now, cpu_s = 50.0, 7.0
    measured = ThreadCpuShare(lambda: now, lambda: cpu_s)
    assert measured.recent() == 0.0
    now, cpu_s = 50.05, 7.05
    assert measured.recent() == 0.0, "too short to say anything"
    now, cpu_s = 50.2, 7.06
    assert measured.recent() == pytest.approx(0.3)
    now, cpu_s = 51.2, 7.06
    assert measured.recent() == 0.0
    now, cpu_s = 52.2, 9.0
    assert measured.recent() == 1.0
