import os

from bench.machine import OtherWork, busy_s, cpu_model, machine_line, other_work_line


def test_the_processor_is_named() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: Fast One\n") == "Fast One"


def test_the_machine_is_told_in_one_line() -> None:
    found = {
        "cores": 2,
        "cpu": "Fast One",
        "python": "3.11.7",
        "uvloop": None,
        "envoy": "1.40.0",
        "load_average": 0.5,
        "loop_us": {"median_us": 250.0, "min_us": 150.0},
    }
    line = machine_line(found)
    assert line.startswith("machine: 2 cores, Fast One, Python 3.11.7, no uvloop, Envoy 1.40.0; load average 0.50")


def test_what_others_do_is_what_is_busy_and_not_ours() -> None:
    assert busy_s("cpu  100 10 20 5000 30 1 2 7 0 0\ncpu0 1 1\n") == 140 / os.sysconf("SC_CLK_TCK")
    assert OtherWork().cores() >= 0.0
    assert "the servers' own" in other_work_line(0.1, 2)
    assert other_work_line(1.25, 2).startswith(
        "other work took 1.25 of the machine's 2 cores meanwhile: ratios of CPU hold"
    )
