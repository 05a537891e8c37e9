from __future__ import annotations

from extproc.edge.scraping.failures import ScrapeFailure


def test_an_endpoint_that_answers_is_reachable() -> None:
    unreachable = {failure for failure in ScrapeFailure if failure.unreachable}
    assert unreachable == {ScrapeFailure.CONNECT, ScrapeFailure.TIMEOUT, ScrapeFailure.TLS}
