from pathlib import Path

from bench.proxy_cost import Sample, loads, summary, table
from bench.stage import engines_config


def _sample(cpu_us: float, p99_ms: float) -> Sample:
    return Sample(cpu_us, 300.0, 2.0, p99_ms, 10.0)


def test_ratios_are_taken_within_a_round() -> None:
    found = summary(
        {
            "bare": [_sample(100, 4), _sample(200, 5), _sample(400, 6)],
            "picker": [_sample(150, 4), _sample(300, 10), _sample(500, 6)],
        }
    )
    assert found["cpu_us"] == {"bare": 200, "picker": 300, "ratio": 1.5, "ratios": [1.5, 1.5, 1.25]}
    assert found["p99_ms"]["ratio"] == 1.0


def test_the_last_load_runs_at_half_of_what_the_bare_server_can_do() -> None:
    planned = loads(2.0, 1500.0)
    assert (planned[-1].rate, planned[-1].requests, planned[-1].p99_aim) == (1500.0, 3000, 1.5)
    assert [load.cpu_aim for load in planned if load.cpu_aim] == [1.5, 2.0]


def test_the_table_has_a_line_per_load() -> None:
    found = summary({"bare": [_sample(100, 4)], "picker": [_sample(150, 6)]})
    figures = {
        "loads": {"1 kB": found},
        "idle_cores": {"bare": 0.0, "picker": 0.01},
        "resident_mb": {"bare": 40.0, "picker": 80.0},
    }
    lines = table(figures)
    assert "1.50" in lines[2]
    assert lines[-1].startswith("idle:")


def test_each_engine_listens_on_its_port() -> None:

    config = engines_config([1, 2], Path("page"))
    listeners = config["static_resources"]["listeners"]
    assert [one["address"]["socket_address"]["port_value"] for one in listeners] == [1, 2]
