from bench.compare import Sample, aim, order_of, summary, table
from bench.load import LoadResult


def _sample(cpu_us: float, p99_ms: float) -> Sample:
    return Sample(cpu_us, 300.0, 2.0, p99_ms, 10.0)


def test_ratios_are_taken_within_a_round() -> None:
    found = summary(
        {
            "bare": [_sample(100, 4), _sample(200, 5), _sample(400, 6)],
            "native": [_sample(150, 4), _sample(300, 10), _sample(500, 6)],
        }
    )
    cpu = found["native"]["cpu_us"]
    assert (cpu["median"], cpu["most"], cpu["ratio"], cpu["ratios"]) == (300, 500, 1.5, [1.5, 1.5, 1.25])
    assert found["native"]["p99_ms"]["ratio"] == 1.0
    assert len(found["bare"]["samples"]) == 3


def test_each_takes_each_place_in_the_order() -> None:
    orders = [order_of(["a", "b", "c"], number) for number in range(6)]
    assert orders[:2] == [["a", "b", "c"], ["c", "b", "a"]]
    assert {order[0] for order in orders} == {"a", "b", "c"}
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_a_sample_is_per_request() -> None:
    result = LoadResult(100, 0, 2.0, tuple(place / 1000 for place in range(100)))
    sample = Sample.of(result, 0.05, 0.02, 300)
    assert (sample.cpu_us, sample.envoy_us, sample.messages, sample.rate) == (500.0, 200.0, 3.0, 50.0)
    assert (sample.p50_ms, sample.p99_ms, sample.max_ms) == (50.0, 99.0, 99.0)


def test_the_table_has_a_line_per_server_and_ratios_to_the_first() -> None:
    lines = table(summary({"bare": [_sample(100, 4)], "native": [_sample(25, 6)]}))
    assert lines[0].split()[:4] == ["CPU", "us", "x", "bare"]
    assert lines[1].split()[:2] == ["bare", "100"]
    assert lines[2].split()[:4] == ["native", "25", "0.250", "0.25-0.25"]


def test_an_aim_is_met_by_what_is_shown() -> None:
    assert aim("a", 0.4, 0.4004) == {"name": "a", "aim": 0.4, "measured": 0.4, "met": True}
    assert aim("a", 1.5, 1.506)["met"] is False
