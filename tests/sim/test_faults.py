import pytest

from extproc.sim.faults import Fault, FaultKind, FaultPlan, parse_fault


def test_parse() -> None:
    assert parse_fault(b'{"kind":"none"}') == Fault(FaultKind.NONE, path="")
    fault = parse_fault(b'{"kind":"error","status":503,"count":2,"path":"/metrics"}')
    assert fault == Fault(FaultKind.ERROR, status=503, count=2, path="/metrics")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"kind":"explode"}',
        b'{"kind":"slow","second":1}',
        b'{"kind":"slow","seconds":-1}',
        b'{"kind":"error","status":200}',
        b'{"kind":"error","count":0}',
        b'{"kind":"reset","after_tokens":-1}',
        b'{"kind":"trickle","seconds":-1}',
        b'{"kind":"answer","body":5}',
    ],
)
def test_bad_orders(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_fault(body)


def test_a_fault_meets_its_paths_and_counts_down() -> None:
    plan = FaultPlan()
    assert plan.meet("/v1/models") is None
    fault = Fault(FaultKind.ERROR, count=2)
    plan.order(fault)
    assert plan.meet("/metrics") is None
    assert [plan.meet("/v1/completions") for _ in range(3)] == [fault, fault, None]


def test_the_next_order_replaces_the_one_in_force() -> None:
    plan = FaultPlan()
    plan.order(Fault(FaultKind.HANG))
    assert plan.meet("/v1/models") is not None
    plan.order(Fault(FaultKind.NONE))
    assert plan.meet("/v1/models") is None
    plan.order(Fault(FaultKind.RESTART))
    assert plan.meet("/v1/models") is None


def test_faults_of_different_paths_are_in_force_together() -> None:
    plan = FaultPlan()
    page, chats = Fault(FaultKind.ANSWER, path="/metrics", body="x"), Fault(FaultKind.ERROR)
    narrow = Fault(FaultKind.HANG, path="/v1/chat/", count=1)
    for fault in (page, chats, narrow):
        plan.order(fault)
    assert plan.meet("/metrics/") is page
    assert [plan.meet("/v1/chat/completions") for _ in range(2)] == [narrow, chats]
    plan.order(parse_fault(b'{"kind":"none","path":"/metrics"}'))
    assert plan.meet("/metrics") is None
    assert plan.meet("/v1/models") is chats
    plan.order(page)
    plan.order(parse_fault(b'{"kind":"none"}'))
    assert plan.meet("/metrics") is plan.meet("/v1/models") is None
