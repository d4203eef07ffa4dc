"""What gateways tell each other: leads by samples of their chains, reports, hostile bytes."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.replicas.leads import SharedPending, positions
from gateway.replicas.load import Channel
from gateway.replicas.messages import (
    MAX_BYTES,
    MAX_LEADS,
    MAX_SAMPLES,
    VERSION,
    BadMessage,
    LeadRow,
    LoadRow,
    Report,
    decode,
    encode,
)
from gateway.routing.pool import Pool
from tests.gateway.routing_parts import make_pool

HOSTILE = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "text": b"hello",
    "a map": msgspec.msgpack.encode({"version": 1}),
    "too short": msgspec.msgpack.encode([VERSION]),
    "a later version": msgspec.msgpack.encode([VERSION + 1, "g"]),
    "no id": msgspec.msgpack.encode([VERSION, ""]),
    "a long id": msgspec.msgpack.encode([VERSION, "g" * 65]),
    "id not utf-8": b"\x92\x01\xa1\xff",
    "negative counts": msgspec.msgpack.encode([VERSION, "g", [["w0", -1, 0, 0, 0, 0, 0]]]),
    "floats": msgspec.msgpack.encode([VERSION, "g", [["w0", 1, 0, float("nan"), 0, 0, 0]]]),
    "huge counts": msgspec.msgpack.encode([VERSION, "g", [["w0", 1 << 60, 0, 0, 0, 0, 0]]]),
    "short rows": msgspec.msgpack.encode([VERSION, "g", [["w0", 1]]]),
    "a short hash": msgspec.msgpack.encode([VERSION, "g", [], True, [["w0", 1, [b"x"]]]]),
    "too many samples": msgspec.msgpack.encode(
        [VERSION, "g", [], True, [["w0", 99, [b"x" * 16] * (MAX_SAMPLES + 2)]]]
    ),
    "too many leads": msgspec.msgpack.encode(
        [VERSION, "g", [], True, [["w0", 1, [b"x" * 16]]] * (MAX_LEADS + 1)]
    ),
    "too long": b"\x00" * (MAX_BYTES + 1),
    "deep": b"\x91" * 5000,
    "not bytes": 7,
}


def channel(pool: Pool, gateway: str) -> Channel:
    return Channel(pool, f"load-{gateway}", gateway, lambda: None)


def chain(length: int, *, shared: int = 0, name: bytes = b"a") -> list[bytes]:
    """A chain of hashes that agrees with every other in its first ``shared`` links."""
    return [
        (b"%d" % at).ljust(12) + (b"same" if at < shared else name.ljust(4)) for at in range(length)
    ]


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_are_refused(data: object) -> None:
    with pytest.raises(BadMessage):
        decode(data)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode(data)


def test_a_later_versions_appended_fields_do_no_harm() -> None:
    data = msgspec.msgpack.encode(
        [VERSION, "g", [["w0", 1, 2, 3, 4, 5, 0, "new"]], True, None, None, False, 9]
    )

    assert decode(data).loads == (LoadRow("w0", 1, 2, 3, 4, 5, 0),)


@settings(deadline=None)
@given(st.integers(1, 2000))
def test_a_chain_is_sampled_from_its_first_to_its_last_link(length: int) -> None:
    at = positions(length)

    assert (at[0], at[-1]) == (0, length - 1)
    assert len(at) <= MAX_SAMPLES + 1
    assert sorted(set(at)) == list(at)


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 400))
def test_a_lead_elsewhere_never_credits_more_than_is_shared_and_hardly_less(
    theirs: int, ours: int, shared: int
) -> None:
    shared = min(shared, theirs, ours)
    hashes = chain(theirs, shared=shared, name=b"t")
    row = LeadRow("w0", theirs, tuple(hashes[at] for at in positions(theirs)))
    pending = SharedPending(lambda: None)
    pending.told("g", [row], ["w0"])

    credit = pending.credit(chain(ours, shared=shared, name=b"o")).get("w0", 0)

    assert credit <= shared
    assert credit >= shared - theirs / MAX_SAMPLES - 1


def test_a_lead_is_announced_once_and_ends_with_its_first_token() -> None:
    told: list[int] = []
    pending = SharedPending(lambda: told.append(1))
    leader = pending.lead("w0", chain(40))
    assert leader is not None
    assert len(pending.announced()) == len(told) == 1

    pending.end(leader)
    pending.end(leader)

    assert pending.announced() == ()
    assert (pending.num_changes, bool(pending)) == (2, False)


def test_a_prompt_that_two_workers_compute_elsewhere_gets_no_third_leader() -> None:
    pending = SharedPending(lambda: None)
    hashes = chain(40)
    for gateway, worker in (("a", "w0"), ("b", "w1")):
        row = LeadRow(worker, 40, tuple(hashes[at] for at in positions(40)))
        pending.told(gateway, [row], ["w0", "w1", "w2"])

    assert pending.lead("w2", hashes) is None
    pending.told("a", (), ())
    assert pending.lead("w2", hashes) is not None


@pytest.mark.parametrize(
    "row",
    [LeadRow("stranger", 1, (b"x" * 16,)), LeadRow("w0", 40, (b"x" * 16,))],
    ids=["unknown worker", "too few samples"],
)
def test_a_lead_that_cannot_be_is_left_out(row: LeadRow) -> None:
    pending = SharedPending(lambda: None)
    pending.told("g", [row], ["w0"])

    assert not pending


@pytest.mark.parametrize("skew_s", [-4000.0, -2.0, 0.0, 2.0, 1e6])
def test_times_are_translated_whatever_the_clocks_say(skew_s: float) -> None:
    here, there = make_pool(2, reads=False), make_pool(2, reads=False)
    listener, talker = channel(here, "a"), channel(there, "b")
    now_s = 5000.0
    books = there.workers["w1"].books
    first = books.charge(now_s - 3.0, prompt_tokens=100, uncached_tokens=60, prefill_s=0.5)
    books.charge(now_s - 1.0, prompt_tokens=50, uncached_tokens=50, restore_s=2.5)
    books.first_token(first, now_s - 0.25)

    payload = talker.due(now_s)
    assert payload is not None
    listener.heard(decode(payload), now_s + skew_s)

    found = listener.others.of("w1")
    assert found is not None
    assert (found.in_flight, found.queued_tokens, found.context_tokens) == (2, 50, 550)
    assert found.progress_at_s == pytest.approx(now_s + skew_s - 0.25, abs=1e-5)
    assert found.restore_until_s == pytest.approx(now_s + skew_s + 1.5, abs=1e-5)
    assert listener.others.of("w0") is None


def test_nothing_is_said_while_nothing_changes_except_heartbeats() -> None:
    pool = make_pool(2, reads=False)
    talker = channel(pool, "a")
    assert talker.due(10.0) is not None
    assert talker.due(10.05) is None
    charge = pool.workers["w0"].books.charge(10.1, prompt_tokens=10, uncached_tokens=10)
    assert talker.due(10.1) is not None
    assert talker.due(10.15) is None
    assert talker.due(10.2) is not None, "busy gateways prove that they live every 100 ms"
    pool.workers["w0"].books.finish(charge)
    assert talker.due(10.25) is not None
    assert talker.due(10.4) is None
    assert talker.due(10.5) is not None, "idle ones every 500 ms"
    assert talker.due(10.9) is None


steps = st.lists(
    st.tuples(st.sampled_from(["charge", "first", "finish", "lose"]), st.integers(0, 3)),
    max_size=60,
)


@settings(deadline=None)
@given(steps)
def test_what_others_see_is_what_the_books_say_and_a_lost_report_is_made_good(
    history: list[tuple[str, int]],
) -> None:
    here, there = make_pool(4, reads=False), make_pool(4, reads=False)
    listener, talker = channel(here, "a"), channel(there, "b")
    now_s, loses = 100.0, False
    charges: list[tuple[str, Any]] = []
    for what, number in history:
        now_s += 0.05
        worker_id = f"w{number}"
        books = there.workers[worker_id].books
        if what == "charge":
            charged = books.charge(now_s, prompt_tokens=99, uncached_tokens=7, prefill_s=0.1)
            charges.append((worker_id, charged))
        elif what == "lose":
            loses = True
        elif charges:
            at, charged = charges[number % len(charges)]
            end = there.workers[at].books
            end.first_token(charged, now_s) if what == "first" else end.finish(charged)
        payload = talker.due(now_s)
        if payload is None:
            continue
        loses = loses and not decode(payload).is_full
        if not loses:
            listener.heard(decode(payload), now_s)
            check(listener, there)
    now_s += 1.0
    payload = talker.due(now_s)
    assert payload is not None
    listener.heard(decode(payload), now_s)
    check(listener, there)


def check(listener: Channel, there: Pool) -> None:
    for worker_id, worker in there.workers.items():
        found, books = listener.others.of(worker_id), worker.books
        if found is None:
            assert not books.in_flight
            continue
        assert (found.in_flight, found.queued_tokens, found.context_tokens) == (
            books.in_flight, books.queued_tokens, books.context_tokens
        )  # fmt: skip
        assert found.queued_s == pytest.approx(books.queued_s, abs=1e-5)
        if books.in_flight:
            assert found.progress_at_s == pytest.approx(books.progress_at_s, abs=1e-5)


def test_leads_are_repeated_with_heartbeats_for_gateways_that_come_later() -> None:
    pool = make_pool(2, reads=False)
    talker = channel(pool, "a")
    pool.pending.lead("w0", chain(20))
    pool.workers["w0"].books.charge(10.0, prompt_tokens=320, uncached_tokens=320)
    said = [talker.due(10.0 + 0.1 * beat) for beat in range(7)]
    leads = [decode(payload).leads for payload in said if payload is not None]

    assert leads[0]
    assert leads[1] is None
    assert [row for row in leads if row] == [leads[0], leads[0]]


def test_a_gateway_that_leaves_takes_its_load_and_its_leads_with_it() -> None:
    here, there = make_pool(2, reads=False), make_pool(2, reads=False)
    listener, talker = channel(here, "a"), channel(there, "b")
    there.workers["w0"].books.charge(10.0, prompt_tokens=10, uncached_tokens=10)
    there.pending.lead("w0", chain(20))
    payload = talker.due(10.0)
    assert payload is not None
    listener.heard(decode(payload), 10.0)
    assert here.pending.credit(chain(20)) == {"w0": 20}

    listener.heard(decode(talker.goodbye()), 10.1)

    assert listener.others.of("w0") is None
    assert not here.pending


def test_made_up_gateways_take_bounded_memory() -> None:
    listener = channel(make_pool(2, reads=False), "a")
    refused = 0
    for _ in range(1000):
        report = Report(VERSION, os.urandom(8).hex(), (LoadRow("w0", 1, 1, 1, 1, 1, 0),), True)
        try:
            listener.heard(decode(encode(report)), 1.0)
        except BadMessage:
            refused += 1

    assert len(listener.others) == 256
    assert refused == 744


def test_workers_nobody_knows_are_not_remembered() -> None:
    listener = channel(make_pool(1, reads=False), "a")
    rows = tuple(LoadRow(f"x{n}", 1, 1, 1, 1, 1, 0) for n in range(500))
    listener.heard(Report(VERSION, "b", rows, True), 1.0)

    assert listener.others.of("x1") is None
