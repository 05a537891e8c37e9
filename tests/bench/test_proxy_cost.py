from bench.compare import Sample, summary
from bench.envoy_stage import PLAIN
from bench.proxy_cost import added, lines, loads


def _sample(cpu_us: float, p99_ms: float) -> Sample:
    return Sample(cpu_us, 300.0, 2.0, p99_ms, 10.0)


def test_the_loads_carry_the_aims_of_each_transport() -> None:
    planned = loads(2.0, 400.0)
    assert (planned[-1].rate, planned[-1].requests) == (400.0, 800)
    assert planned[-1].p99_aims == {"grpcio": 1.5, "native": 1.5}
    assert [dict(load.cpu_aims) for load in planned if load.cpu_aims] == [
        {"grpcio": 1.5, "native": 0.4},
        {"grpcio": 2.0, "native": 0.5},
    ]
    assert any(load.body_bytes is None for load in planned)


def test_what_is_added_is_compared_round_by_round() -> None:
    found = added(
        {
            "bare": [_sample(1, 6), _sample(1, 12), _sample(1, 4)],
            "native": [_sample(1, 5), _sample(1, 6), _sample(1, 9)],
            PLAIN: [_sample(0, 4), _sample(0, 4), _sample(0, 4)],
        }
    )
    assert found["native"]["p99_ms"] == 2.0
    assert found["native"]["ratios"] == [0.5, 0.25]  # bare added nothing in the third
    assert found["native"]["ratio"] == 0.375
    assert PLAIN not in found


def test_the_lines_name_the_rate_that_was_carried() -> None:
    samples = {"bare": [_sample(100, 6)], "native": [_sample(50, 5)], PLAIN: [_sample(0, 4)]}
    figures = {
        "rounds": 1,
        "loads": {"1 kB": summary(samples)},
        "latency": {"rate": 550, "wanted_rate": 1000, "servers": summary(samples), "added": added(samples)},
        "idle_cores": {"bare": 0.0, "native": 0.012},
        "resident_mb": {"bare": 40.0, "native": 80.0},
    }
    said = "\n".join(lines(figures))
    assert "550/s, the highest rate bare and native both carry; this machine does not carry 1000/s" in said
    assert "native adds 1.0 ms to the p99 of Envoy without a filter, 0.50 times what bare adds" in said
    assert "native 0.012" in said
