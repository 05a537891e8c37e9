import json
import random
from pathlib import Path

from bench.bodies import GrowingChats, LongPrompts, write_bodies, write_one
from extproc.prefix.blocks import BlockSchedule, hash_blocks
from extproc.request import parse


def test_growing_chats_differ_and_go_on() -> None:
    chats = GrowingChats(random.Random(1), conversations=4, turns=3)
    bodies = [chats.next() for _ in range(200)]
    assert len(set(bodies)) == 200
    lengths = {len(json.loads(body)["messages"]) for body in bodies}
    assert lengths == {2, 4, 6}  # system prompt, then question and answer in turn, a question last
    texts = [[message["content"] for message in json.loads(body)["messages"]] for body in bodies]
    longer = [text for text in texts if len(text) > 2]
    begun = {tuple(text) for text in texts}
    assert sum(any(tuple(text[:cut]) in begun for cut in (2, 4)) for text in longer) > len(longer) * 0.9


def test_long_prompts_have_thirty_blocks_on_average_and_share_nine() -> None:
    prompts = LongPrompts(random.Random(1))
    schedule = BlockSchedule(256)
    counts, heads = [], set()
    for _ in range(300):
        request = parse("/v1/chat/completions", prompts.next(), content_type="application/json")
        blocks = hash_blocks(request.prompts[0], 0, schedule)
        counts.append(len(blocks))
        heads.add(tuple(blocks[:9]))
    assert 29 < sum(counts) / len(counts) < 32
    assert len(heads) <= LongPrompts.HEADS


def test_files_hold_one_body_per_line(tmp_path: Path) -> None:
    assert len(write_one(tmp_path / "one", 1000, random.Random(1)).read_bytes()) == 1000
    many = write_bodies(tmp_path / "many", 7, random.Random(1)).read_bytes().split(b"\n")
    assert [json.loads(body)["stream"] for body in many] == [False] * 7
