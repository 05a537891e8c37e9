import pytest

from bench.peers import Peer, PeerError, parse_peers


def test_a_peer_gets_ports_and_endpoints() -> None:
    (peer,) = parse_peers(["mine=./run --grpc={port} -m {metrics_port} -h {health_port} '{endpoints}'"], [])
    assert peer.profile == "direct"
    argv = peer.argv(port=1, health_port=2, metrics_port=3, endpoints=["127.0.0.1:8", "127.0.0.1:9"])
    assert argv == ["./run", "--grpc=1", "-m", "3", "-h", "2", "127.0.0.1:8,127.0.0.1:9"]


def test_profile_and_port_are_given_by_name() -> None:
    peers = parse_peers(["a=x", "b=y"], ["b=full-duplex"], ["b=9002"])
    assert peers == (Peer("a", ("x",)), Peer("b", ("y",), "full-duplex", 9002))


@pytest.mark.parametrize(
    ("peers", "profiles", "ports", "said"),
    [
        (["mine"], [], [], "write NAME=COMMAND"),
        (["mine= "], [], [], "write NAME=COMMAND"),
        (["a/b=x"], [], [], "write NAME=COMMAND"),
        (["bare=x"], [], [], "one of our own"),
        (["a=x", "a=y"], [], [], "given twice"),
        (["a=x '"], [], [], "cannot be split into words"),
        (["a=x {prot}"], [], [], "{prot} is not a placeholder; there are {port}"),
        (["a=x"], ["b=direct"], [], "there is no --peer b=COMMAND"),
        (["a=x"], ["a=fast"], [], "not one of direct, full-duplex"),
        (["a=x"], [], ["a=none"], "not a port from 1 to 65535"),
    ],
)
def test_what_cannot_be_used_is_refused(peers: list[str], profiles: list[str], ports: list[str], said: str) -> None:
    with pytest.raises(PeerError) as caught:
        parse_peers(peers, profiles, ports)
    assert said in str(caught.value)
