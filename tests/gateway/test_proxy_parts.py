"""The proxy's pure parts: header lines, the retry budget, content encodings."""

from __future__ import annotations

import gzip
import zlib

import brotli
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import HeadTooLarge, InvalidRequest, MalformedAnswer
from gateway.proxy.encoding import Inflater
from gateway.proxy.headers import request_id_from, to_client, to_worker
from gateway.proxy.retry import MAX_SAVED, RetryBudget
from gateway.tenancy import TrustedPeers

NAMES = st.sampled_from(
    [b"Accept", b"X-A", b"TE", b"Upgrade", b"Host", b"Content-Length", b"KEEP-ALIVE", b"x-hop"]
)


def lines_of(block: bytes) -> list[bytes]:
    assert block == b"" or block.endswith(b"\r\n")
    return block.split(b"\r\n")[:-1]


@given(st.lists(st.tuples(NAMES, st.sampled_from([b"1", b"a, b", b""])), max_size=8))
def test_lines_keep_order_spelling_and_repetition(pairs: list[tuple[bytes, bytes]]) -> None:
    dropped = {b"te", b"upgrade", b"host", b"content-length", b"keep-alive", b"x-hop"}
    sent = lines_of(to_worker(pairs, "close, X-Hop", 10_000))
    expected = [n + b": " + v for n, v in pairs if n.lower() not in dropped]

    assert sent == [*expected, b"accept-encoding: identity"]


def test_a_workers_host_header_is_its_clients_business_and_its_framing_is_not() -> None:
    pairs = [(b"Host", b"h"), (b"Content-Length", b"3"), (b"X-Request-Id", b"theirs")]

    assert to_client(pairs, b"") == b"Host: h\r\n"
    assert to_client([], b"") == b""


@pytest.mark.parametrize(
    "name", [b"X-Data-Parallel-Rank", b"x-kv-cache-source-host-port", b"X-Tenant-Id"]
)
def test_what_only_the_gateway_may_say_to_a_worker_is_not_passed_on(name: bytes) -> None:
    assert lines_of(to_worker([(name, b"1")], None, 1000)) == [b"accept-encoding: identity"]


PEERS: list[tuple[list[str], object, str]] = [
    (["10.0.0.0/8"], ("10.1.2.3", 5), "acme"),
    (["10.0.0.0/8"], ("11.1.2.3", 5), ""),
    (["10.1.2.3"], ("10.1.2.3", 5), "acme"),
    (["10.0.0.0/8"], ("::ffff:10.1.2.3", 5, 0, 0), "acme"),
    (["fd00::/8"], ("fd00::1", 5, 0, 0), "acme"),
    (["fe80::/10"], ("fe80::1%eth0", 5, 0, 2), "acme"),
    (["10.0.0.0/8", "::1"], ("::1", 5, 0, 0), "acme"),
    (["0.0.0.0/0"], ("::1", 5, 0, 0), ""),
    (["0.0.0.0/0"], None, ""),
    (["0.0.0.0/0"], "/run/socket", ""),
    (["0.0.0.0/0"], ("no address", 5), ""),
    ([], ("127.0.0.1", 5), ""),
]


@pytest.mark.parametrize(("networks", "peer", "expected"), PEERS)
def test_a_tenant_is_believed_only_from_configured_peers(
    networks: list[str], peer: object, expected: str
) -> None:
    peers = TrustedPeers(networks)

    assert peers.tenant([(b"X-Tenant-Id", b" acme ")], peer) == expected
    assert peers.tenant([], peer) == peers.tenant([(b"x-tenant-id", b" ")], peer) == ""
    assert bool(peers) is bool(networks)


@pytest.mark.parametrize("values", [[b"a", b"b"], [b"a, b"], [b"x" * 200], [b"\xff"], [b"a\tb"]])
def test_several_tenants_or_an_odd_one_are_refused_from_a_trusted_peer_alone(
    values: list[bytes],
) -> None:
    raw = [(b"x-tenant-id", value) for value in values]

    assert TrustedPeers(["10.0.0.0/8"]).tenant(raw, ("127.0.0.1", 5)) == ""
    with pytest.raises(InvalidRequest, match="one tenant"):
        TrustedPeers(["127.0.0.0/8"]).tenant(raw, ("127.0.0.1", 5))


def test_header_lines_are_bounded() -> None:
    pairs = [(b"a", b"x" * 1000)] * 10
    with pytest.raises(HeadTooLarge, match="limit is 9000"):
        to_worker(pairs, None, 9000)


def test_names_chosen_by_clients_are_not_remembered_for_ever() -> None:
    from gateway.proxy import headers

    to_worker([(b"n%d" % i, b"") for i in range(5000)], None, 1 << 20)

    assert len(headers._forwarded) <= headers._MAX_KNOWN_NAMES


def test_new_request_ids_differ() -> None:
    assert request_id_from(None) != request_id_from(None)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_retries_are_a_share_of_the_requests() -> None:
    clock = Clock()
    budget = RetryBudget(0.25, clock)
    while budget.take():
        pass
    for _ in range(40):
        budget.deposit()
    taken = sum(budget.take() for _ in range(50))

    assert taken == 10


def test_a_quiet_gateway_may_still_retry_and_never_saves_up_more_than_the_bound() -> None:
    clock = Clock()
    budget = RetryBudget(0.2, clock)
    while budget.take():
        pass
    clock.now_s += 1.5
    assert budget.take()
    assert not budget.take()
    clock.now_s += 3600
    for _ in range(1000):
        budget.deposit()

    assert sum(budget.take() for _ in range(1000)) == MAX_SAVED


def test_a_ratio_of_zero_means_no_retries_at_all() -> None:
    clock = Clock()
    budget = RetryBudget(0.0, clock)
    budget.deposit()
    clock.now_s += 3600

    assert not budget.take()


@given(st.binary(max_size=3000), st.integers(1, 700), st.sampled_from([b"gzip", b"deflate", b"br"]))
def test_any_split_inflates_to_the_same_bytes(plain: bytes, size: int, encoding: bytes) -> None:
    pack = {b"gzip": gzip.compress, b"deflate": zlib.compress, b"br": brotli.compress}[encoding]
    packed = pack(plain)
    inflater = Inflater(encoding, 3000)
    pieces = [inflater.feed(packed[i : i + size]) for i in range(0, len(packed), size)]
    inflater.end()

    assert b"".join(pieces) == plain


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"not gzip at all", "not in the encoding"), (gzip.compress(bytes(5000)), "too large")],
)
def test_what_cannot_be_inflated_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(MalformedAnswer, match=message):
        Inflater(b"gzip", 1000).feed(data)


def test_a_compressed_answer_that_was_cut_off_is_refused() -> None:
    inflater = Inflater(b"gzip", 1000)
    inflater.feed(gzip.compress(b"x" * 100)[:-5])
    with pytest.raises(MalformedAnswer, match="cut off"):
        inflater.end()
