"""When a source of endpoints is believed, and what is told of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dns.rcode
import pytest

from extproc.config.load import load
from extproc.config.schema import ENDPOINT_SOURCES, DnsConfig, FileConfig, PoolConfig
from extproc.edge.discovery.resolve import DnsResolver, Family, NoAddressesError, ResolveError
from extproc.edge.discovery.sources import (
    KINDS,
    Discovery,
    DnsDiscovery,
    FileDiscovery,
    Listeners,
    StaticDiscovery,
    discovery_for,
)
from extproc.edge.process.tasks import Tasks
from extproc.types import Endpoint
from tests.edge.discovery.dns_server import dns_server


class FakeResolver:
    """Answers from a dictionary; an exception there is raised."""

    def __init__(self) -> None:
        self.hosts: dict[str, list[str] | ResolveError] = {}
        self.srv: list[tuple[str, int]] | ResolveError = []
        self.asked: list[str] = []

    async def addresses(self, host: str, family: Family) -> list[str]:
        self.asked.append(host)
        found = self.hosts.get(host, NoAddressesError("no such name"))
        if isinstance(found, ResolveError):
            raise found
        return found

    async def services(self, name: str) -> list[tuple[str, int]]:
        if isinstance(self.srv, ResolveError):
            raise self.srv
        return self.srv


class Told:
    """What the listeners heard."""

    def __init__(self) -> None:
        self.lists: list[list[Endpoint]] = []
        self.failures: list[str] = []
        self.listeners = Listeners(self.lists.append, self.failures.append)

    @property
    def ids(self) -> list[list[str]]:
        return [[endpoint.id for endpoint in found] for found in self.lists]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def resolver() -> FakeResolver:
    return FakeResolver()


@contextmanager
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Collect the level and what it is about of each line."""
    caplog.set_level(logging.INFO)
    found: list[str] = []
    yield found
    found += [f"{record.levelname} {record.message}" for record in caplog.records]


DOWN = ResolveError("server failure")


async def test_addresses_count_at_once(told: Told, resolver: FakeResolver) -> None:
    discovery = StaticDiscovery(["10.0.0.2:1", "[::1]:2", "10.0.0.1:1", "10.0.0.2:1"], told.listeners, resolver)
    assert not discovery.first_done.is_set()
    await discovery.refresh()
    assert discovery.first_done.is_set()
    assert told.ids == [["10.0.0.2:1", "[::1]:2", "10.0.0.1:1"]]
    assert resolver.asked == []
    assert told.lists[0][0].models is None


async def test_nothing_at_all_is_an_answer(told: Told, resolver: FakeResolver) -> None:
    discovery = StaticDiscovery([], told.listeners, resolver)
    await discovery.refresh()
    assert told.ids == [[]]


async def test_names_are_looked_up_again(told: Told, resolver: FakeResolver) -> None:
    resolver.hosts = {"a": ["10.0.0.1", "10.0.0.2"], "b": ["10.0.0.3"]}
    discovery = StaticDiscovery(["b:8", "a:8", "a:9"], told.listeners, resolver, frozenset({"m"}))
    await discovery.refresh()
    assert told.ids == [["10.0.0.3:8", "10.0.0.1:8", "10.0.0.2:8", "10.0.0.1:9", "10.0.0.2:9"]]
    assert {(endpoint.name, endpoint.models) for endpoint in told.lists[0]} == {
        ("a", frozenset({"m"})),
        ("b", frozenset({"m"})),
    }
    assert resolver.asked == ["b", "a"]
    await discovery.refresh()
    assert len(told.lists) == 1  # nothing new, nobody told
    resolver.hosts["b"] = ["10.0.0.4"]
    await discovery.refresh()
    assert told.ids[1][0] == "10.0.0.4:8"


async def test_two_names_of_one_address_are_one_endpoint(told: Told, resolver: FakeResolver) -> None:
    resolver.hosts = {"a": ["10.0.0.1"], "b": ["10.0.0.1"]}
    await StaticDiscovery(["a:8", "b:8"], told.listeners, resolver).refresh()
    assert [(endpoint.id, endpoint.name) for endpoint in told.lists[0]] == [("10.0.0.1:8", "a")]


async def test_a_failure_keeps_what_was_found(
    told: Told, resolver: FakeResolver, caplog: pytest.LogCaptureFixture
) -> None:
    with log_lines(caplog) as lines:
        resolver.hosts = {"a": ["10.0.0.1"]}
        discovery = StaticDiscovery(["a:8"], told.listeners, resolver)
        await discovery.refresh()
        resolver.hosts["a"] = DOWN
        for _ in range(10):
            await discovery.refresh()
        resolver.hosts["a"] = ["10.0.0.1"]
        await discovery.refresh()
    assert told.ids == [["10.0.0.1:8"]]
    assert told.failures == ["endpoints"] * 10
    assert lines == [
        "WARNING endpoint look-up failed; the endpoints found last stay",
        "INFO endpoint look-up works again",
    ]


async def test_one_name_s_failure_does_not_hide_another(told: Told, resolver: FakeResolver) -> None:
    resolver.hosts = {"a": DOWN, "b": ["10.0.0.2"]}
    discovery = StaticDiscovery(["a:8", "b:8"], told.listeners, resolver)
    await discovery.refresh()
    resolver.hosts["a"] = ["10.0.0.1"]
    await discovery.refresh()
    assert told.ids == [["10.0.0.2:8"], ["10.0.0.1:8", "10.0.0.2:8"]]


async def test_an_empty_answer_is_believed_the_third_time_in_a_row(
    told: Told, resolver: FakeResolver, caplog: pytest.LogCaptureFixture
) -> None:
    with log_lines(caplog) as lines:
        resolver.hosts = {"a": ["10.0.0.1"]}
        discovery = StaticDiscovery(["a:8"], told.listeners, resolver)
        await discovery.refresh()
        for _ in range(2):
            del resolver.hosts["a"]
            await discovery.refresh()
            await discovery.refresh()
            assert told.ids == [["10.0.0.1:8"]]
            resolver.hosts["a"] = ["10.0.0.1"]
            await discovery.refresh()
        del resolver.hosts["a"]
        for _ in range(5):
            await discovery.refresh()
        assert told.ids == [["10.0.0.1:8"], []]
        assert len(told.failures) == 6
        resolver.hosts["a"] = ["10.0.0.1"]
        await discovery.refresh()
    assert told.ids[2] == ["10.0.0.1:8"]
    assert lines[-2:] == ["WARNING a name has no endpoints", "INFO a name has endpoints again"]


async def test_a_first_look_that_fails_is_done_but_tells_nothing(told: Told, resolver: FakeResolver) -> None:
    resolver.hosts = {"a": DOWN}
    discovery = StaticDiscovery(["a:8"], told.listeners, resolver)
    await discovery.refresh()
    assert discovery.first_done.is_set()
    assert told.lists == []


async def test_a_name_that_never_existed_is_nothing_in_the_end(told: Told, resolver: FakeResolver) -> None:
    discovery = StaticDiscovery(["a:8"], told.listeners, resolver)
    for _ in range(3):
        await discovery.refresh()
    assert told.ids == [[]]


def write(path: Path, text: str) -> None:
    other = path.with_name("other")
    other.write_text(text, encoding="utf-8")
    other.rename(path)


async def test_a_file(told: Told, resolver: FakeResolver, tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    write(path, "endpoints:\n- 10.0.0.1:8\n- {address: 10.0.0.2, port: 9, name: two, models: [m], labels: {zone: a}}\n")
    discovery = FileDiscovery(FileConfig(path=str(path)), told.listeners, resolver, frozenset({"pool"}))
    await discovery.refresh()
    one, two = told.lists[0]
    assert (one.id, one.name, one.models) == ("10.0.0.1:8", "", frozenset({"pool"}))
    assert (two.id, two.name, two.models, two.labels) == ("10.0.0.2:9", "two", frozenset({"m"}), {"zone": "a"})
    write(path, "[10.0.0.1:8]")
    await discovery.refresh()
    assert told.ids[1:] == [["10.0.0.1:8"]]


async def test_a_change_of_labels_or_models_is_told(told: Told, resolver: FakeResolver, tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    discovery = FileDiscovery(FileConfig(path=str(path)), told.listeners, resolver)
    for index, zone in enumerate("abb"):
        write(path, f"[{{address: 10.0.0.2, port: 9, labels: {{zone: {zone}}}}}]  # {index}")
        await discovery.refresh()
    assert [dict(found[0].labels) for found in told.lists] == [{"zone": "a"}, {"zone": "b"}]


async def test_a_bad_file_keeps_the_last_good_one(
    told: Told, resolver: FakeResolver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "endpoints.yaml"
    with log_lines(caplog) as lines:
        write(path, "[10.0.0.1:8]")
        discovery = FileDiscovery(FileConfig(path=str(path)), told.listeners, resolver)
        await discovery.refresh()
        write(path, "[10.0.0.1]")
        for _ in range(3):
            await discovery.refresh()
        write(path, "")
        await discovery.refresh()
        write(path, "[10.0.0.1:8]  # mended")
        await discovery.refresh()
    assert told.ids == [["10.0.0.1:8"]]
    assert told.failures == ["file"] * 2
    assert [line.partition(" ")[0] for line in lines] == ["WARNING", "WARNING", "INFO"]
    assert "the port is missing" in vars(caplog.records[0])["why"]


async def test_a_file_that_is_not_there_yet_and_goes_later(told: Told, resolver: FakeResolver, tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    discovery = FileDiscovery(FileConfig(path=str(path)), told.listeners, resolver)
    await discovery.refresh()
    assert discovery.first_done.is_set()
    assert (told.lists, told.failures) == ([], ["file"])
    write(path, "[10.0.0.1:8]")
    await discovery.refresh()
    path.unlink()
    await discovery.refresh()
    assert told.ids == [["10.0.0.1:8"]]
    assert told.failures == ["file"] * 2


async def test_names_in_a_file_are_looked_up_every_fifth_second(
    told: Told, resolver: FakeResolver, tmp_path: Path
) -> None:
    path = tmp_path / "endpoints.yaml"
    write(path, "[a:8]")
    resolver.hosts = {"a": ["10.0.0.1"]}
    discovery = FileDiscovery(FileConfig(path=str(path)), told.listeners, resolver)
    for _ in range(10):
        await discovery.refresh()
    assert len(resolver.asked) == 3  # when it was read, and at the fifth and tenth look
    write(path, "[b:8]")
    resolver.hosts = {"b": ["10.0.0.2"], "a": DOWN}
    await discovery.refresh()
    assert told.ids[-1] == ["10.0.0.2:8"]
    assert resolver.asked[-1] == "b"


async def test_dns_addresses_from_a_real_server(told: Told) -> None:
    async with dns_server() as server:
        server.records["vllm.test", "A"] = ["10.0.0.10", "10.0.0.9"]
        config = DnsConfig(host="vllm.test", port=8000)
        discovery = DnsDiscovery(config, told.listeners, DnsResolver("127.0.0.1", server.port), frozenset({"m"}))
        await discovery.refresh()
        assert told.ids == [["10.0.0.9:8000", "10.0.0.10:8000"]]
        assert (told.lists[0][0].name, told.lists[0][0].models) == ("vllm.test", frozenset({"m"}))
        server.rcode = dns.rcode.SERVFAIL
        await discovery.refresh()
        server.rcode = None
        server.records["vllm.test", "A"] = ["10.0.0.9"]
        await discovery.refresh()
        assert told.ids[1:] == [["10.0.0.9:8000"]]
        assert told.failures == ["dns"]


async def test_srv_records_from_a_real_server(told: Told) -> None:
    async with dns_server() as server:
        server.records["_http._tcp.test", "SRV"] = ["0 1 8001 b.test.", "0 1 8000 a.test."]
        server.records["a.test", "A"] = ["10.0.0.1"]
        server.records["b.test", "AAAA"] = ["2001:db8::1"]
        config = DnsConfig(host="_http._tcp.test", type="SRV")
        discovery = DnsDiscovery(config, told.listeners, DnsResolver("127.0.0.1", server.port))
        await discovery.refresh()
        assert told.ids == [["10.0.0.1:8000", "[2001:db8::1]:8001"]]
        assert [endpoint.name for endpoint in told.lists[0]] == ["a.test", "b.test"]
        server.records["_http._tcp.test", "SRV"] = ["0 1 8000 a.test."]
        await discovery.refresh()
        assert told.ids[1:] == [["10.0.0.1:8000"]]


async def test_srv_failures_and_empty_answers(told: Told, resolver: FakeResolver) -> None:
    discovery = DnsDiscovery(DnsConfig(host="s", type="SRV"), told.listeners, resolver)
    resolver.srv = DOWN
    await discovery.refresh()
    assert told.lists == []
    resolver.srv, resolver.hosts = [("a", 8)], {"a": ["10.0.0.1"]}
    await discovery.refresh()
    resolver.srv = NoAddressesError("gone")
    for _ in range(3):
        assert told.ids == [["10.0.0.1:8"]]
        await discovery.refresh()
    assert told.ids == [["10.0.0.1:8"], []]


async def test_dns_that_fails_from_the_start_tells_nothing(told: Told, resolver: FakeResolver) -> None:
    resolver.hosts = {"a": DOWN}
    discovery = DnsDiscovery(DnsConfig(host="a", port=8), told.listeners, resolver)
    await discovery.refresh()
    assert told.lists == []


class Steps:
    """A sleep that a test releases step by step."""

    def __init__(self) -> None:
        self.asleep: asyncio.Queue[float] = asyncio.Queue()
        self.go: asyncio.Queue[None] = asyncio.Queue()

    async def sleep(self, seconds: float) -> None:
        self.asleep.put_nowait(seconds)
        await self.go.get()


async def test_looking_again_and_again(told: Told, resolver: FakeResolver) -> None:
    steps = Steps()
    resolver.hosts = {"a": ["10.0.0.1"]}
    discovery: Discovery = DnsDiscovery(DnsConfig(host="a", port=8), told.listeners, resolver, sleep=steps.sleep)
    await discovery.start()
    await discovery.first_done.wait()
    assert await steps.asleep.get() == 5
    resolver.hosts = {"a": ["10.0.0.2"]}
    steps.go.put_nowait(None)
    await steps.asleep.get()
    await discovery.close()
    await discovery.close()
    assert told.ids == [["10.0.0.1:8"], ["10.0.0.2:8"]]


async def test_names_in_the_static_list_are_looked_at_every_five_seconds(told: Told, resolver: FakeResolver) -> None:
    steps = Steps()
    resolver.hosts = {"a": ["10.0.0.1"]}
    discovery = StaticDiscovery(["a:8"], told.listeners, resolver, sleep=steps.sleep)
    await discovery.start()
    assert await steps.asleep.get() == 5
    await discovery.close()


async def test_a_list_of_addresses_is_looked_at_once(told: Told, resolver: FakeResolver) -> None:
    discovery = StaticDiscovery(["10.0.0.1:8"], told.listeners, resolver)
    await discovery.start()
    await discovery.first_done.wait()
    task = discovery._task
    assert task is not None
    await task
    await discovery.close()
    assert told.ids == [["10.0.0.1:8"]]


@pytest.mark.parametrize("entry", ["a:8", "10.0.0.1:8"])
async def test_a_listener_s_defect_is_logged_and_tried_again(
    entry: str, resolver: FakeResolver, caplog: pytest.LogCaptureFixture
) -> None:
    steps, calls = Steps(), []

    def listen(endpoints: list[Endpoint]) -> None:
        calls.append(endpoints)
        if len(calls) == 1:
            raise RuntimeError("the listener's defect")

    resolver.hosts = {"a": ["10.0.0.1"]}
    tasks = Tasks(sleep=steps.sleep)
    discovery = StaticDiscovery([entry], Listeners(listen, tasks=tasks), resolver, sleep=steps.sleep)
    await discovery.start()
    await steps.asleep.get()
    steps.go.put_nowait(None)
    async with asyncio.timeout(10):
        while len(calls) < 2:
            await asyncio.sleep(0)
    await discovery.close()
    assert tasks.failures["discovery"] == 1
    assert "the listener's defect" in caplog.text


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("endpoints: ['10.0.0.1:8']", StaticDiscovery),
        ("file: {path: f}", FileDiscovery),
        ("dns: {host: h, port: 1}", DnsDiscovery),
        ("models: [m]", StaticDiscovery),
    ],
)
async def test_the_source_that_the_configuration_names(text: str, kind: type) -> None:
    pool: PoolConfig = load(f"pool: {{{text}}}").pool
    assert type(discovery_for(pool, lambda _: None)) is kind


def test_every_source_of_the_configuration_has_a_kind() -> None:
    assert tuple(KINDS) == ENDPOINT_SOURCES
