"""The remote tier over a real server: what is stored comes back, and no fault hangs or lies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.kvkeys import namespace_key
from runner.tiers import connections, remote
from runner.tiers.remote import MAX_VALUE_BYTES, TTL_S, RemoteStore
from tests.runner.wire_parts import (
    BLOCK_BYTES,
    LONG_S,
    NAMESPACE,
    Collected,
    hangs,
    make_payloads,
    make_places,
    says,
    scripted,
    soon,
    views,
)
from tests.valkey import Valkey

PLACES = make_places(40)
PAYLOADS = make_payloads(40)
KEYS = [place.record.key for place in PLACES]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    started = Valkey(tmp_path_factory.mktemp("v"))
    started.start()
    yield started
    started.stop()


@pytest.fixture
def raw(server: Valkey) -> Iterator[redis.Redis]:
    """Look at what is stored; empty at first."""
    with server.client() as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        yield client


@pytest.fixture
def store(server: Valkey, raw: redis.Redis) -> Iterator[RemoteStore]:
    made = RemoteStore(server.url, namespace=NAMESPACE, block_bytes=BLOCK_BYTES)
    yield made
    made.close()


def keep(store: RemoteStore, num_blocks: int = 40) -> None:
    assert all(store.write(PLACES[:num_blocks], views(PAYLOADS[:num_blocks])))


def read(store: RemoteStore, num_blocks: int = 40) -> tuple[str, list[bytes]]:
    got = Collected()
    outcome = store.read(PLACES[:num_blocks], got, soon())
    return outcome, got.blocks


def test_what_is_stored_comes_back_bit_by_bit(store: RemoteStore) -> None:
    keep(store)
    assert store.exists(KEYS, soon()) == [True] * 40
    assert read(store) == ("done", PAYLOADS)


def test_another_process_finds_it(server: Valkey, store: RemoteStore) -> None:
    keep(store)
    other = RemoteStore(server.url, namespace=NAMESPACE, block_bytes=BLOCK_BYTES)
    assert read(other) == ("done", PAYLOADS)
    other.close()


def test_runners_of_another_namespace_find_nothing(server: Valkey, store: RemoteStore) -> None:
    keep(store)
    foreign = namespace_key({"model": "another"})
    other = RemoteStore(server.url, namespace=foreign, block_bytes=BLOCK_BYTES)
    assert other.exists(KEYS, soon()) == [False] * 40
    assert read(other) == ("missing", [])
    other.close()


@pytest.mark.parametrize("num_bytes", [MAX_VALUE_BYTES, MAX_VALUE_BYTES + 1, 3 * MAX_VALUE_BYTES])
def test_a_large_block_is_split_and_whole_again(
    server: Valkey, raw: redis.Redis, num_bytes: int
) -> None:
    payloads = make_payloads(3, num_bytes=num_bytes)
    store = RemoteStore(server.url, namespace=NAMESPACE, block_bytes=num_bytes)
    assert store.write(PLACES[:3], views(payloads)) == [True] * 3
    got = Collected()
    assert store.read(PLACES[:3], got, soon()) == "done"
    assert got.blocks == payloads

    names = store.names(KEYS[1])
    assert len(names) == -(-num_bytes // MAX_VALUE_BYTES)
    if len(names) > 1:
        raw.delete(names[1])
        assert store.exists(KEYS[:3], soon()) == [True, False, True]
        assert store.read(PLACES[:3], Collected(), soon()) == "missing"
        assert store.write(PLACES[:3], views(payloads)) == [True] * 3
        assert store.read(PLACES[:3], Collected(), soon()) == "done"
    store.close()


def test_keys_are_named_by_schema_namespace_and_block_and_expire(
    store: RemoteStore, raw: redis.Redis
) -> None:
    keep(store, 2)
    name = f"warmlane:kv:v1:{NAMESPACE.hex()[:16]}:{KEYS[0].hex()}".encode()
    assert store.names(KEYS[0]) == [name]
    assert raw.dbsize() == 2
    assert TTL_S - 60 < raw.ttl(name) <= TTL_S


def test_storing_again_prolongs_the_life_and_sends_no_bytes(
    store: RemoteStore, raw: redis.Redis
) -> None:
    keep(store, 2)
    raw.expire(store.names(KEYS[0])[0], 60)
    before = raw.info("stats")["total_net_input_bytes"]
    keep(store, 2)

    assert raw.ttl(store.names(KEYS[0])[0]) > 60
    assert raw.info("stats")["total_net_input_bytes"] - before < BLOCK_BYTES


def test_a_block_that_left_in_between_is_an_ordinary_miss(
    store: RemoteStore, raw: redis.Redis
) -> None:
    keep(store)
    assert all(store.exists(KEYS, soon()))
    raw.delete(*store.names(KEYS[30]))

    assert read(store) == ("missing", PAYLOADS[:30])
    assert read(store, 30) == ("done", PAYLOADS[:30])
    assert store.exists(KEYS[29:32], soon()) == [True, False, True]


def flip(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-1],
    "empty": lambda _: b"",
    "only the head": lambda data: data[: len(data) - BLOCK_BYTES],
    "longer": lambda data: data + b"x",
    "much longer": lambda data: data * 100,
    "zeros": lambda data: bytes(len(data)),
    "another version": lambda data: data[:4] + b"\x02" + data[5:],
    "another namespace": lambda data: data[:32] + bytes(32) + data[64:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_value_is_found_deleted_and_stored_anew(
    store: RemoteStore, raw: redis.Redis, damage: str
) -> None:
    keep(store)
    name = store.names(KEYS[7])[0]
    value = raw.get(name)
    assert value is not None
    raw.set(name, DAMAGES[damage](value))

    assert read(store) == ("damaged", PAYLOADS[:7])
    assert not raw.exists(name)
    keep(store)
    assert read(store) == ("done", PAYLOADS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(bit=st.integers(0, 8 * BLOCK_BYTES - 1), head=st.booleans())
def test_a_flipped_bit_anywhere_is_found(
    store: RemoteStore, raw: redis.Redis, bit: int, head: bool
) -> None:
    keep(store, 3)
    name = store.names(KEYS[1])[0]
    value = raw.get(name)
    assert value is not None
    raw.set(name, flip(value, bit % (8 * 64) if head else bit))

    assert read(store, 3) == ("damaged", PAYLOADS[:1])


def test_a_key_of_another_type_is_damage_and_harms_nobody(
    store: RemoteStore, raw: redis.Redis
) -> None:
    keep(store, 5)
    raw.delete(*store.names(KEYS[2]))
    raw.rpush(store.names(KEYS[2])[0], "a list")

    assert read(store, 5) == ("damaged", PAYLOADS[:2])
    assert not store.is_paused
    keep(store, 5)
    assert read(store, 5) == ("done", PAYLOADS[:5])


def test_who_asked_may_stop_at_any_block(store: RemoteStore) -> None:
    keep(store)
    got = Collected(stop_at=3)
    assert store.read(PLACES, got, soon()) == "stopped"
    assert got.blocks == PAYLOADS[:3]
    assert read(store) == ("done", PAYLOADS)


def test_a_full_server_stores_nothing_and_still_reads(store: RemoteStore, raw: redis.Redis) -> None:
    keep(store, 5)
    raw.config_set("maxmemory", 1)
    assert store.write(PLACES[5:10], views(PAYLOADS[5:10])) == [False] * 5
    assert store.is_paused
    assert read(store, 5) == ("done", PAYLOADS[:5])


def test_a_full_server_is_tried_again_after_a_while(server: Valkey, raw: redis.Redis) -> None:
    now_s = [1000.0]
    store = RemoteStore(
        server.url, namespace=NAMESPACE, block_bytes=BLOCK_BYTES, clock=lambda: now_s[0]
    )
    raw.config_set("maxmemory", 1)
    assert store.write(PLACES[:1], views(PAYLOADS[:1])) == [False]
    raw.config_set("maxmemory", 0)
    assert store.write(PLACES[:1], views(PAYLOADS[:1])) == [False]
    now_s[0] += connections.MIN_PAUSE_S
    assert store.write(PLACES[:1], views(PAYLOADS[:1])) == [True]
    assert not store.is_paused
    store.close()


def test_a_read_only_replica_stores_nothing_and_still_reads(
    store: RemoteStore, raw: redis.Redis
) -> None:
    keep(store, 5)
    raw.config_set("min-replicas-to-write", 1)
    try:
        assert store.write(PLACES[5:7], views(PAYLOADS[5:7])) == [False] * 2
        assert read(store, 5) == ("done", PAYLOADS[:5])
    finally:
        raw.config_set("min-replicas-to-write", 0)


def test_many_threads_share_a_few_connections(store: RemoteStore, raw: redis.Redis) -> None:
    keep(store)
    results = []
    threads = [threading.Thread(target=lambda: results.append(read(store))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)

    assert results == [("done", PAYLOADS)] * 16
    clients = [c for c in raw.client_list() if c["name"] == "" and c["cmd"] == "get"]
    assert len(clients) <= connections.MAX_CONNECTIONS


def test_asking_ahead_stays_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BUDGET_BYTES", 3 * BLOCK_BYTES * connections.MAX_CONNECTIONS)
    asked = bytearray()

    def listens(connection: socket.socket) -> None:
        while received := connection.recv(65536):
            asked.extend(received)

    with scripted(listens) as server:
        store = RemoteStore(
            f"redis://127.0.0.1:{server.port}", namespace=NAMESPACE, block_bytes=BLOCK_BYTES
        )
        assert store.read(PLACES, Collected(), soon(0.1)) == "stopped"
        store.close()
    assert asked.count(b"GET") == 3


# A server that is away


def test_a_killed_server_is_a_failure_at_once_and_found_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    now_s = [time.monotonic()]
    server = Valkey(tmp_path_factory.mktemp("k"))
    server.start()
    store = RemoteStore(
        server.url, namespace=NAMESPACE, block_bytes=BLOCK_BYTES, clock=lambda: now_s[0]
    )

    def until() -> float:
        return now_s[0] + LONG_S

    try:
        keep(store)

        def kill(at: int, payload: memoryview) -> bool:
            if at == 3:
                server.stop()
            return True

        outcome = store.read(PLACES * 50, kill, until())
        assert outcome == "failed"
        assert store.is_paused
        assert store.read(PLACES, Collected(), until()) == "failed"
        assert store.exists(KEYS, until()) == [False] * 40
        assert store.write(PLACES, views(PAYLOADS)) == [False] * 40

        server.start()
        now_s[0] += connections.MAX_PAUSE_S
        assert store.read(PLACES[:1], Collected(), until()) == "missing"
        assert not store.is_paused
        keep(store)
        # Its idle connections die unnoticed.
        server.stop()
        server.start()
        keep(store)
        assert not store.is_paused
    finally:
        store.close()
        server.stop()


def test_a_server_that_stands_still_costs_no_more_than_the_deadline(
    server: Valkey, store: RemoteStore
) -> None:
    keep(store)
    server.pause()
    try:
        assert store.read(PLACES, Collected(), soon(0.5)) == "stopped"
        assert store.is_paused
        assert store.exists(KEYS, soon()) == [False] * 40
    finally:
        server.resume()


def test_a_tight_deadline_of_one_request_is_not_held_against_the_server(
    store: RemoteStore,
) -> None:
    keep(store)

    def slowly(at: int, payload: memoryview) -> bool:
        time.sleep(0.02)
        return True

    assert store.read(PLACES * 10, slowly, soon(0.1)) == "stopped"
    assert not store.is_paused
    assert read(store) == ("done", PAYLOADS)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"", "failed"),
        (b"$20", "failed"),
        (b"$10144\r\nabc", "failed"),
        (b"-LOADING the dataset\r\n", "failed"),
        (b"-NOAUTH Authentication required.\r\n", "failed"),
        (b"-MOVED 1 10.0.0.1:6379\r\n", "failed"),
        (b"HTTP/1.1 200 OK\r\n", "failed"),
        (b"*1\r\n$1\r\na\r\n", "failed"),
        (b"$-1\r\n", "missing"),
        (b"$3\r\nabc\r\n", "damaged"),
        (b"$9999999999\r\nabc", "damaged"),
    ],
)
def test_whatever_a_server_answers_ends_the_read_and_nothing_else(
    answer: bytes, outcome: str
) -> None:
    with scripted(says(answer)) as server:
        store = RemoteStore(
            f"redis://127.0.0.1:{server.port}", namespace=NAMESPACE, block_bytes=BLOCK_BYTES
        )
        got = Collected()
        assert store.read(PLACES[:2], got, soon()) == outcome
        assert got.blocks == []
        store.close()


def test_a_server_that_hangs_holds_nobody_beyond_the_deadline() -> None:
    with scripted(hangs) as server:
        store = RemoteStore(
            f"redis://127.0.0.1:{server.port}", namespace=NAMESPACE, block_bytes=BLOCK_BYTES
        )
        assert store.read(PLACES, Collected(), soon(0.5)) == "stopped"
        assert store.exists(KEYS, soon(0.5)) == [False] * 40
        # Now left alone: no connection is tried.
        before = server.num_connections
        assert store.read(PLACES, Collected(), soon()) == "failed"
        assert server.num_connections == before
        store.close()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "redis://nosuch.invalid", "unix:///no/one"])
def test_a_server_that_was_never_there_is_a_failure(url: str) -> None:
    store = RemoteStore(url, namespace=NAMESPACE, block_bytes=BLOCK_BYTES)
    assert store.read(PLACES, Collected(), soon()) == "failed"
    assert store.exists(KEYS, soon()) == [False] * 40
    assert store.write(PLACES, views(PAYLOADS)) == [False] * 40
    store.close()


def test_an_expired_deadline_asks_nobody_and_is_not_held_against_the_server(
    server: Valkey, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store)
    # On a busy machine a millisecond may take many.
    monkeypatch.setattr(connections, "MIN_SILENCE_S", LONG_S)
    server.pause()
    try:
        # What waited in a queue until its time was over, or all but over.
        for left_s in (-1, 0, 0.001):
            assert store.read(PLACES, Collected(), soon(left_s)) == "stopped"
            assert store.exists(KEYS, soon(left_s)) == [False] * 40
        assert not store.is_paused
    finally:
        server.resume()
    assert read(store) == ("done", PAYLOADS)


def test_nothing_wanted_is_done(store: RemoteStore) -> None:
    assert store.read([], Collected(), soon()) == "done"
    assert store.write([], []) == []
    assert store.exists([], soon()) == []


def test_pauses_grow_and_end_with_the_first_success() -> None:
    now_s = [0.0]
    pause = connections.Pause(lambda: now_s[0])
    lengths = []
    for _ in range(8):
        pause.failed()
        start = now_s[0]
        while pause.is_on:
            now_s[0] += 0.1
        lengths.append(now_s[0] - start)
    assert lengths == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], abs=0.11)
    pause.succeeded()
    assert not pause.is_on
