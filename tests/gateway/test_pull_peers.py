"""What bundled runners say about their peers becomes who may pull from whom, and how quickly."""

from __future__ import annotations

import json

import pytest

from gateway.fleet.peers import Peers, PeerWatch, Pulled, base_url, fetch_peers
from gateway.routing.choose import Decision
from gateway.routing.cost import CostModel
from gateway.routing.plan import Plan
from gateway.routing.pool import Pool
from gateway.routing.sources import pull_request
from gateway.upstream.client import Upstream
from tests.fakes.engine import RawEngine, answer
from tests.gateway.routing_parts import Clock, dispatcher, hold, ids, make_pool

MODEL = CostModel(1e-4, 1e-9, 0.004, 5e-8)
URLS = [f"http://127.0.0.1:{9000 + k}" for k in range(3)]


def says(*urls: str, serves: bool = True, tokens: int = 0, seconds: float = 0.0) -> Peers:
    return Peers(serves, dict.fromkeys(urls, Pulled(tokens, seconds)))


def watch_of(pool: Pool, worker_id: str) -> PeerWatch:
    worker = pool.workers[worker_id]
    return PeerWatch(pool, [worker], Upstream(worker.url))


def fleet(*documents: Peers) -> tuple[Pool, list[PeerWatch]]:
    pool = make_pool(len(documents), model=MODEL, engine="runner")
    watches = [watch_of(pool, worker_id) for worker_id in pool.workers]
    for watch, document in zip(watches, documents, strict=True):
        watch.take(document)
    return pool, watches


async def beside_a_busy_holder(pool: Pool) -> tuple[Plan, Decision]:
    """Return the choice for a prompt that w0 holds while it is busy."""
    routes = dispatcher(pool, Clock())
    plan = await routes.plan(pool, ids([i % 251 for i in range(8001)]), in_full=True)
    hold(pool, "w0", plan.prompt)
    pool.workers["w0"].books.charge(
        1000.0, prompt_tokens=100_000, uncached_tokens=100_000, prefill_s=50.0
    )
    return plan, routes.choose(plan)


async def test_runners_that_name_each_other_pull_from_a_busy_holder() -> None:
    pool, _ = fleet(says(URLS[1]), says(URLS[0]))
    _, decision = await beside_a_busy_holder(pool)
    told = pull_request(decision, pool)

    assert (decision.worker, decision.source) == ("w1", "peer:w0")
    assert told is not None
    assert told.source == {"url": URLS[0], "tokens": 8000}


@pytest.mark.parametrize(
    "documents",
    [
        pytest.param((says(URLS[1], serves=False), says(URLS[0])), id="the holder does not serve"),
        pytest.param((says(URLS[1]), says()), id="the other has no peers"),
        pytest.param((says(URLS[1]), says(URLS[2], "http://h:1")), id="the holder is not its peer"),
    ],
)
async def test_nobody_is_sent_to_a_peer_that_would_refuse_or_is_not_allowed(
    documents: tuple[Peers, ...],
) -> None:
    pool, _ = fleet(*documents)
    _, decision = await beside_a_busy_holder(pool)

    assert decision.source in ("own", "recompute")
    assert pull_request(decision, pool) is None


async def test_what_changed_between_the_choice_and_the_sending_is_not_sent() -> None:
    pool, watches = fleet(says(URLS[1]), says(URLS[0]))
    _, decision = await beside_a_busy_holder(pool)
    watches[1].take(says())

    assert pull_request(decision, pool) is None


def test_a_runner_is_not_its_own_peer() -> None:
    pool, _ = fleet(says(URLS[0]), says())

    assert not pool.workers["w0"].can_pull


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://10.0.0.1:80", "http://10.0.0.1/"),
        ("http://HOST:8101", "http://host:8101"),
        ("http://[::1]:8101/", "http://[::1]:8101"),
    ],
)
def test_urls_that_mean_one_place_are_one(one: str, other: str) -> None:
    assert base_url(one) == base_url(other) != ""


def test_the_first_report_and_what_came_since_teach_the_rate_of_the_pair() -> None:
    pool, watches = fleet(says(URLS[1]), says(URLS[0], tokens=10_000, seconds=2.0))
    rates = pool.workers["w1"].learner

    assert rates.pull_rates["w0"] == pytest.approx(5000.0)
    watches[1].take(says(URLS[0], tokens=20_000, seconds=3.0))
    assert 5000.0 < rates.pull_rates["w0"] < 10_000.0
    known = rates.pull_rates["w0"]
    watches[1].take(says(URLS[0], tokens=20_000, seconds=3.0))
    assert rates.pull_rates["w0"] == known


def test_the_time_of_failed_pulls_makes_their_source_slower() -> None:
    pool, watches = fleet(says(URLS[1]), says(URLS[0], tokens=10_000, seconds=1.0))
    before = pool.workers["w1"].learner.pull_rates["w0"]
    watches[1].take(says(URLS[0], tokens=10_000, seconds=9.0))
    watches[1].take(says(URLS[0], tokens=20_000, seconds=10.0))

    assert pool.workers["w1"].learner.pull_rates["w0"] < before


def test_a_restarted_runner_counts_from_the_start_again() -> None:
    pool, watches = fleet(says(URLS[1]), says(URLS[0], tokens=100_000, seconds=10.0))
    before = pool.workers["w1"].learner.pull_rates["w0"]
    watches[1].take(says(URLS[0], tokens=5000, seconds=5.0))

    assert pool.workers["w1"].learner.pull_rates["w0"] < before


def test_a_worker_that_joins_later_becomes_a_source_with_the_next_answer() -> None:
    pool, watches = fleet(says(URLS[1], URLS[2]), says())
    assert pool.workers["w0"].pull_peers == {URLS[1]}

    extra = make_pool(3).workers["w2"]
    pool.add(extra)
    watches[0].take(says(URLS[1], URLS[2]))
    assert pool.workers["w0"].pull_peers == {URLS[1], URLS[2]}


async def asked(body: bytes, status: int = 200) -> Peers | None:
    async with RawEngine(lambda _: answer(body, status)) as engine:
        upstream = Upstream(engine.url)
        try:
            return await fetch_peers(upstream)
        finally:
            assert [seen.target for seen in engine.seen] == ["/cache"]
            upstream.close()


async def test_a_runners_answer_is_read() -> None:
    pulls = {URLS[0]: {"blocks": 4, "bytes": 5, "tokens": 64, "seconds": 0.5, "failed": 1}}
    body = {"block_size": 16, "tiers": {}, "peers": {"serves": True, "pulls": pulls}}

    assert await asked(json.dumps(body).encode()) == Peers(True, {URLS[0]: Pulled(64, 0.5)})


@pytest.mark.parametrize(
    "body", [b'{"tiers": {}}', b'{"peers": {}}'], ids=["an older runner", "no peers"]
)
async def test_a_runner_that_names_no_peers_has_none(body: bytes) -> None:
    assert await asked(body) == Peers()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"not found", 404),
        (b"{", 200),
        (b"[]", 200),
        (b'{"peers": {"serves": "yes"}}', 200),
        (b'{"peers": {"pulls": {"http://h:1": {"tokens": "many"}}}}', 200),
    ],
)
async def test_an_answer_that_is_none_says_nothing(body: bytes, status: int) -> None:
    assert await asked(body, status) is None
