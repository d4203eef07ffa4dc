"""Budgets per minute: of one gateway, of several together, and as clients are told of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import TenantConfig
from gateway.errors import RateLimited
from gateway.tenancy.buckets import MAX_DEBT, Bucket
from gateway.tenancy.budgets import Budgets, duration
from gateway.tenancy.estimate import completion_estimate, prompt_estimate
from gateway.tenancy.exchange import BEAT_S, GONE_S, BudgetExchange
from gateway.tenancy.spending import BadSpendingError, Row, decode, encode
from prefix_index.replica.link import Link
from tests.support import poll_until
from tests.valkey import Valkey

if TYPE_CHECKING:
    from pathlib import Path

ACME = TenantConfig(name="acme", requests_per_min=60, tokens_per_min=6000)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Fleet:
    """Gateways that tell each other what they spent, at a beat, over a channel that may be cut."""

    def __init__(self, number: int, tenant: TenantConfig = ACME) -> None:
        self.clock = Clock()
        self.tenant = tenant
        self.gateways: list[BudgetExchange] = []
        self.is_cut = False
        for _ in range(number):
            self.join()
        self.beat()
        self.beat()

    def join(self) -> BudgetExchange:
        budgets = Budgets(self.clock)
        budgets.reload((self.tenant,))
        link = Link("redis://127.0.0.1:1/0", namespace="t")
        name = f"g{len(self.gateways)}"
        gateway = BudgetExchange(link, budgets, gateway=name, clock=self.clock)
        self.gateways.append(gateway)
        return gateway

    def beat(self, seconds: float = BEAT_S) -> None:
        """Let a beat pass, after which everybody has heard everybody."""
        self.clock.now_s += seconds
        said = []
        for gateway in self.gateways:
            gateway.look()
            said += list(gateway.due())
        if not self.is_cut:
            for gateway in self.gateways:
                for payload in said:
                    gateway.heard(payload)

    def ask(self, number: int, tokens: int = 1) -> bool:
        """Have one gateway admit a request."""
        budget = self.gateways[number]._budgets.get(self.tenant.name)
        assert budget is not None
        return budget.take(tokens, self.clock())[0] == ""

    def balance(self, number: int, resource: str = "requests") -> float:
        budget = self.gateways[number]._budgets.get(self.tenant.name)
        assert budget is not None
        return budget.buckets[resource].balance(self.clock())


# One bucket.


def test_a_bucket_gives_its_limit_at_once_and_then_what_comes_in() -> None:
    bucket = Bucket(60, 0.0)
    for _ in range(60):
        assert bucket.wait_s(1, 0.0) == 0.0
        bucket.spend(1)

    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 0.5) == pytest.approx(0.5)
    assert bucket.wait_s(1, 1.0) == 0.0
    assert bucket.reset_s(1.0) == pytest.approx(59.0)


def test_what_is_larger_than_the_limit_passes_when_the_bucket_is_full_and_is_repaid() -> None:
    bucket = Bucket(100, 0.0)

    assert bucket.wait_s(250, 0.0) == 0.0
    bucket.spend(250)

    assert bucket.wait_s(1, 0.0) == pytest.approx(151 / 100 * 60)
    assert bucket.remaining(0.0) == 0.0


@given(
    st.lists(
        st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 500.0), st.floats(0.0, 1500.0)), max_size=60
    )
)
def test_whatever_is_asked_and_corrected_no_more_is_used_than_comes_in(
    steps: list[tuple[float, float, float]],
) -> None:
    """Estimates that were too low are repaid before anything else passes."""
    limit, now_s, used = 600.0, 0.0, 0.0
    bucket = Bucket(limit, now_s)
    worst = 0.0
    for pause_s, estimate, real in steps:
        now_s += pause_s
        if bucket.wait_s(estimate, now_s) > 0.0:
            continue
        bucket.spend(estimate)
        bucket.spend(real - estimate)
        used += real
        worst = max(worst, real)
    # All that came in, a full bucket, and one request that was estimated too low; debts beyond the
    # bound are forgiven, and no step here reaches it.
    assert MAX_DEBT * limit > 1500.0
    assert used <= limit + now_s * limit / 60 + worst + 1e-6


def test_another_limit_keeps_what_was_spent() -> None:
    clock = Clock()
    budgets = Budgets(clock)
    budgets.reload((ACME,))
    budget = budgets.get("acme")
    assert budget is not None
    assert budget.take(6000, clock()) == ("", 0.0)
    assert budget.take(1, clock())[0] == "tokens"

    budgets.reload((ACME.model_copy(update={"tokens_per_min": 7000}),))

    budget = budgets.get("acme")
    assert budget is not None
    assert budgets.remaining(budget)["tokens"] == pytest.approx(1000)
    # Gone and there again, it has not forgotten; nor is there a way around it by what is limited.
    budgets.reload(())
    assert budgets.get("acme") is None
    budgets.reload((ACME.model_copy(update={"requests_per_min": None}),))
    budget = budgets.get("acme")
    assert budget is not None
    assert budgets.remaining(budget) == {"tokens": pytest.approx(0)}


def test_a_budget_that_is_configured_anew_gives_nothing_back_elsewhere() -> None:
    fleet = Fleet(2)
    for _ in range(20):
        assert fleet.ask(0)
        fleet.beat(0.01)
    before = fleet.balance(1)
    for limits in ({"tokens_per_min": None}, {"requests_per_min": 60}):
        fleet.gateways[0]._budgets.reload((ACME.model_copy(update=limits),))
        fleet.beat(0.01)

    assert fleet.balance(1) == pytest.approx(before, abs=0.1)


# Settling.


def test_a_request_is_charged_what_it_took_once() -> None:
    from gateway.tenancy.budgets import Grant

    clock = Clock()
    budgets = Budgets(clock)
    budgets.reload((ACME,))
    budget = budgets.get("acme")
    assert budget is not None
    budget.take(300, clock())
    grant = Grant(budget, 100, 200)
    grant.settle(1000, 500)
    grant.settle(1000, 500)

    assert budgets.remaining(budget)["tokens"] == pytest.approx(4500)


@pytest.mark.parametrize(
    ("told", "left"),
    [((0, 0), 6000), ((100, None), 5700), ((None, 0), 5900), ((None, None), 5700), ((50, 7), 5943)],
)
def test_what_nobody_told_stays_as_estimated(
    told: tuple[int | None, int | None], left: int
) -> None:
    from gateway.tenancy.budgets import Grant

    clock = Clock()
    budgets = Budgets(clock)
    budgets.reload((ACME,))
    budget = budgets.get("acme")
    assert budget is not None
    budget.take(300, clock())

    Grant(budget, 100, 200).settle(*told)

    assert budgets.remaining(budget)["tokens"] == pytest.approx(left)


def test_a_refusal_says_what_is_short_and_for_how_long() -> None:
    clock = Clock()
    budgets = Budgets(clock)
    budgets.reload((ACME,))
    budget = budgets.get("acme")
    assert budget is not None
    while budget.take(1, clock())[0] == "":
        pass
    short, wait_s = budget.take(1, clock())
    error = budgets.refusal(budget, short, wait_s)

    assert isinstance(error, RateLimited)
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert ("retry-after", "1") in error.http_headers()
    assert budgets.num_refused["acme", "requests"] == 1
    assert "acme" not in error.message


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.017, "17ms"),
        (1.0, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (360.0, "6m0s"),
        (3723.0, "1h2m3s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_of_both_apis_tell_the_same() -> None:
    clock = Clock()
    budgets = Budgets(clock)
    budgets.reload((ACME,))
    budget = budgets.get("acme")
    assert budget is not None
    budget.take(100, clock())

    openai = budget.openai_lines(clock()).decode()
    anthropic = budget.anthropic_lines(clock(), 0.0).decode()

    assert "x-ratelimit-limit-requests: 60\r\n" in openai
    assert "x-ratelimit-remaining-requests: 59\r\n" in openai
    assert "x-ratelimit-reset-requests: 1s\r\n" in openai
    assert "x-ratelimit-remaining-tokens: 5900\r\n" in openai
    assert "anthropic-ratelimit-tokens-limit: 6000\r\n" in anthropic
    assert "anthropic-ratelimit-tokens-remaining: 5900\r\n" in anthropic
    assert "anthropic-ratelimit-tokens-reset: 1970-01-01T00:00:01Z\r\n" in anthropic


ESTIMATES = {
    "chat": ({"messages": [{"role": "user", "content": "x" * 400}]}, 100),
    "parts": ({"messages": [{"content": [{"type": "text", "text": "x" * 400}]}]}, 100),
    "picture": (
        {"messages": [{"content": [{"image_url": {"url": "data:" + "x" * 9999}}]}]},
        1,
    ),
    "prompt": ({"prompt": "x" * 40}, 10),
    "ids": ({"prompt": [1, 2, 3]}, 3),
    "many ids": ({"prompt": [[1, 2], [3]]}, 3),
    "input": ({"input": ["x" * 40, "x" * 40]}, 20),
    "anthropic": ({"system": "x" * 40, "messages": [{"content": "x" * 40}]}, 20),
    "nothing": ({}, 1),
    "odd": ({"messages": 5, "prompt": {"a": [None]}}, 1),
}


@pytest.mark.parametrize(("body", "tokens"), ESTIMATES.values(), ids=ESTIMATES)
def test_a_prompt_is_estimated_by_its_text(body: dict[str, object], tokens: int) -> None:
    assert prompt_estimate(body) == tokens


@pytest.mark.parametrize(
    ("body", "tokens"),
    [({}, 200), ({"max_tokens": 5}, 5), ({"max_tokens": 10**9}, 200), ({"max_tokens": "x"}, 200)],
)
def test_an_answer_is_estimated_by_its_limit(body: dict[str, object], tokens: int) -> None:
    assert completion_estimate(body) == tokens


# Several gateways.


@pytest.mark.parametrize("number", [1, 2, 4, 16])
def test_gateways_together_stay_within_a_budget_however_the_load_falls(number: int) -> None:
    fleet = Fleet(number, TenantConfig(name="acme", requests_per_min=600))
    rng = random.Random(number)
    granted, beats = 0, 600
    for _ in range(beats):
        # A hundred times more than there is; on one gateway, on all, on some.
        asked = rng.choice([[0], range(number), [rng.randrange(number)]])
        for gateway in asked:
            granted += sum(fleet.ask(gateway) for _ in range(100))
        fleet.beat()

    there_was = 600 + 600 / 60 * beats * BEAT_S
    # One request each in the last beat, and what stays in the bucket.
    assert there_was - 600 * 0.05 - number <= granted <= there_was + number


@pytest.mark.parametrize("number", [2, 8])
def test_one_gateway_of_many_gets_the_whole_budget_if_it_has_the_whole_load(number: int) -> None:
    fleet = Fleet(number)
    granted = 0
    for _ in range(1200):
        granted += fleet.ask(0)
        fleet.beat()

    assert granted == pytest.approx(60 + 120, abs=2)


@pytest.mark.parametrize("number", [2, 8])
def test_a_burst_on_all_gateways_at_once_overspends_by_a_request_each_at_most(number: int) -> None:
    fleet = Fleet(number)
    granted = sum(fleet.ask(gateway) for gateway in range(number) for _ in range(100))
    assert granted <= 60 + number
    fleet.beat()
    granted += sum(fleet.ask(gateway) for gateway in range(number) for _ in range(100))
    assert granted <= 60 + 2 * number
    fleet.beat()
    assert len({round(fleet.balance(k), 6) for k in range(number)}) == 1


def test_a_gateway_that_joins_knows_what_was_spent() -> None:
    fleet = Fleet(2)
    while fleet.ask(0):
        fleet.beat(0.0)
    fleet.join()
    fleet.beat(1.0)
    fleet.beat(0.1)

    assert fleet.balance(2) == pytest.approx(fleet.balance(0), abs=0.01)
    assert fleet.balance(2) < 3


def test_what_a_new_gateway_spends_counts_with_the_others() -> None:
    fleet = Fleet(1)
    for _ in range(30):
        fleet.beat()
    fleet.join()
    fleet.beat()
    before = fleet.balance(0)
    assert all(fleet.ask(1) for _ in range(5))
    fleet.beat(0.0)

    assert fleet.balance(0) == pytest.approx(before - 5)


def test_gateways_that_cannot_hear_each_other_keep_to_their_shares() -> None:
    fleet = Fleet(3, TenantConfig(name="acme", requests_per_min=600))
    fleet.is_cut = True
    for _ in range(round(GONE_S / BEAT_S) + 2):
        fleet.beat()
    granted = 0
    for _ in range(600):
        granted += sum(fleet.ask(gateway) for gateway in range(3) for _ in range(50))
        fleet.beat()
    assert granted == pytest.approx(600 + 600, abs=10)

    fleet.is_cut = False
    for _ in range(3):
        fleet.beat()
    # Nothing was given twice, and nothing is lost for longer than it takes to hear of it.
    assert len({round(fleet.balance(k), 3) for k in range(3)}) == 1
    later = 0
    for _ in range(600):
        later += sum(fleet.ask(gateway) for gateway in range(3) for _ in range(50))
        fleet.beat()
    assert 600 * 0.9 <= later <= 600 + 30


def test_a_gateway_that_died_leaves_its_share_to_the_others() -> None:
    fleet = Fleet(2)
    fleet.gateways.pop()
    for _ in range(round(GONE_S / BEAT_S) + 2):
        fleet.beat()

    assert fleet.gateways[0].num_gateways == 1


def test_lost_reports_are_made_up_for() -> None:
    fleet = Fleet(2)
    for _ in range(7):
        assert fleet.ask(0)
        fleet.is_cut = True
        fleet.beat(0.0)
    fleet.is_cut = False
    assert fleet.ask(0)
    fleet.beat(0.0)

    assert fleet.balance(1) == pytest.approx(fleet.balance(0))


@given(st.one_of(st.binary(max_size=200), st.none(), st.text(), st.just(b"\x80" * 300_000)))
def test_anything_else_on_the_channel_changes_nothing(data: object) -> None:
    fleet = Fleet(2)
    before = fleet.balance(0)

    fleet.gateways[0].heard(data)

    assert fleet.gateways[0].errors["bad_message"] == 1
    assert fleet.balance(0) == before
    with pytest.raises(BadSpendingError):
        decode(data)


@settings(max_examples=50)
@given(
    st.lists(
        st.builds(
            Row,
            st.sampled_from(["acme", "other"]),
            st.sampled_from(["requests", "tokens", "gold"]),
            st.floats(-1e15, 1e15),
            st.floats(-1e15, 1e15),
        ),
        max_size=20,
    )
)
def test_a_hostile_gateway_can_stop_a_tenant_and_never_give_it_more(rows: list[Row]) -> None:
    fleet = Fleet(2)
    fleet.gateways[0].heard(encode("hostile", tuple(rows), is_full=True))
    for resource, limit in (("requests", 60), ("tokens", 6000)):
        assert -MAX_DEBT * limit <= fleet.balance(0, resource) <= limit


def test_hostile_gateways_without_end_are_forgotten() -> None:
    fleet = Fleet(1)
    for number in range(1000):
        fleet.gateways[0].heard(encode(f"h{number}", (), is_full=True))

    assert fleet.gateways[0].num_gateways <= 300


async def test_two_gateways_share_a_budget_over_a_real_server(tmp_path: Path) -> None:
    import asyncio
    import time

    server = Valkey(tmp_path)
    server.start()
    links = [Link(server.url, namespace="t", timeout_s=1.0) for _ in range(2)]
    tasks = [asyncio.create_task(link.run()) for link in links]
    gateways = []
    try:
        for number, link in enumerate(links):
            budgets = Budgets(time.monotonic)
            budgets.reload((TenantConfig(name="acme", tokens_per_min=60),))
            gateway = BudgetExchange(
                link, budgets, gateway=f"g{number}", clock=time.monotonic, processes=1
            )
            gateways.append(gateway)
            tasks.append(asyncio.create_task(gateway.run()))
        await poll_until(lambda: all(g.num_gateways == 2 for g in gateways), what="both are heard")
        first, second = (gateway._budgets.get("acme") for gateway in gateways)
        assert first is not None
        assert second is not None
        assert first.take(50, time.monotonic())[0] == ""
        await poll_until(
            lambda: second.buckets["tokens"].balance(time.monotonic()) < 20, what="it is told"
        )
        assert second.take(50, time.monotonic())[0] == "tokens"

        server.stop()
        await poll_until(
            lambda: not any(g.is_connected for g in gateways), what="nobody is heard any more"
        )
        # Alone, each goes on with its share.
        await poll_until(lambda: second.take(1, time.monotonic())[0] == "", what="it goes on")
    finally:
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.stop()
