from __future__ import annotations

import pytest

from extproc.edge.envoy_wire.health import ServingStatus
from extproc.edge.services.health import EXT_PROC_SERVICE, HealthService

READINESS = ("", "readiness", EXT_PROC_SERVICE, "inference-extension")


def states(health: HealthService) -> set[ServingStatus | None]:
    return {health.status(name) for name in READINESS}


def test_readiness_follows_what_was_set_until_it_drains() -> None:
    health = HealthService()
    assert states(health) == {ServingStatus.NOT_SERVING}
    health.set_ready(True)
    assert states(health) == {ServingStatus.SERVING}
    health.set_draining()
    health.set_ready(True)
    assert states(health) == {ServingStatus.NOT_SERVING}
    assert health.status("liveness") is ServingStatus.SERVING


def test_an_unknown_name_has_no_status() -> None:
    assert HealthService().status("nobody") is None


@pytest.mark.parametrize("change", [lambda h: h.set_ready(True), lambda h: h.set_draining(), lambda h: h.close()])
def test_watchers_are_called_on_every_change_until_they_leave(change: object) -> None:
    health, calls = HealthService(), []
    health.watch(watcher := lambda: calls.append(health.closed))
    assert callable(change)
    change(health)
    assert len(calls) == 1
    health.unwatch(watcher)
    health.unwatch(watcher)
    health.set_ready(False)
    assert len(calls) == 1
