from pathlib import Path

import msgspec

from bench.hard_days.journal import Lag, Tail, Visit


def test_what_is_added_is_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.touch()
    tail = Tail(path)
    assert tail.read() == []
    visit = Visit("1-0", 3, 1.0, 2.5, 200, "error", "ab")
    line = msgspec.json.encode(visit) + b"\n"
    with path.open("ab", buffering=0) as file:
        file.write(line + line[:10])
        assert tail.read() == [visit]
        assert tail.read() == []
        file.write(line[10:] + msgspec.json.encode(Lag(4.0, 0.5)) + b"\n")
        assert tail.read() == [visit, Lag(4.0, 0.5)]
