"""Which form of a request is planned and forwarded, and what is reported of the other."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import orjson
import pytest

from gateway.proxy.rewrite import Mode, Rewrite, Rewriter
from gateway.routing.dispatch import Dispatcher, Inbound, Plan
from gateway.routing.pool import Pool
from prefix_index.canonical import RULES, FirstSeenMemory
from prefix_index.chat import ChatTemplate
from prefix_index.index import Index
from prefix_index.prompts import PromptReader
from tests.gateway.routing_parts import (
    BLOCK,
    CHATML,
    Clock,
    byte_tokenizer,
    dispatcher,
    hold,
    make_pool,
)

HANDBOOK = "Handbook rule 7: refunds are accepted within thirty days of delivery. " * 60
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("search_docs", "read_file", "create_ticket")
]


def billing(cch: str, text: str = HANDBOOK) -> bytes:
    line = f"x-anthropic-billing-header: cc_version=2.1.99.a1b; cc_entrypoint=cli; cch={cch};"
    parts = [{"type": "text", "text": line}, {"type": "text", "text": text}]
    return body([{"role": "system", "content": parts}, {"role": "user", "content": "list files"}])


def clock_line(time: str) -> bytes:
    text = f"Current time: 2026-11-30 {time}\n{HANDBOOK}"
    return body([{"role": "system", "content": text}, {"role": "user", "content": "q"}])


def body(messages: list[Any], **members: Any) -> bytes:
    return json.dumps(
        {"model": "m", "seed": 9007199254740993, "messages": messages, **members}
    ).encode()


def inbound(raw: bytes, tenant: str = "", surface: Any = "chat") -> Inbound:
    return Inbound(surface, orjson.loads(raw), {}, "m", tenant, "r1")


@dataclass
class Desk:
    """A rewriter with the pool and dispatcher it works for."""

    mode: Mode
    rules: tuple[str, ...] = RULES
    pool: Pool = field(default_factory=make_pool)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.dispatcher: Dispatcher = dispatcher(self.pool, self.clock)
        memory = FirstSeenMemory(self.clock)
        self.rewriter = Rewriter(self.mode, self.rules, memory, clock=self.clock)

    async def send(self, raw: bytes, tenant: str = "") -> Rewrite:
        """Plan a request that is sent to w0, which then holds its prompt."""
        self.clock.now_s += 1
        rewrite = await self.rewriter.plan(self.dispatcher, self.pool, inbound(raw, tenant), raw)
        await self.rewriter.settle()
        sent = await self.dispatcher.plan(self.pool, rewrite.plan.inbound, in_full=True)
        if self.pool.index is not None:
            hold(self.pool, "w0", sent.prompt)
        return rewrite

    async def explain(self, raw: bytes) -> Rewrite:
        return await self.rewriter.explain(self.dispatcher, self.pool, inbound(raw), raw)


def report_of(rewrite: Rewrite, rule: str) -> dict[str, Any]:
    return next(entry for entry in rewrite.report if entry["rule"] == rule)


async def test_what_is_planned_is_what_is_forwarded() -> None:
    desk = Desk("rewrite")

    for raw in (billing("1a2b3"), clock_line("10:14"), body([], tools=TOOLS)):
        rewrite = await desk.send(raw)
        assert rewrite.plan.inbound.body == orjson.loads(rewrite.raw)
        assert b"9007199254740993" in rewrite.raw


async def test_two_requests_that_differ_in_their_billing_line_share_their_prompt() -> None:
    desk = Desk("rewrite", ("attribution-header",))

    first, second = await desk.send(billing("1a2b3")), await desk.send(billing("9f8e7"))

    assert first.raw == second.raw
    assert b"x-anthropic-billing-header" not in second.raw
    assert first.rules == second.rules == ("attribution-header",)
    assert desk.rewriter.num_changed == {"attribution-header": 2}
    decision = desk.dispatcher.choose(second.plan)
    assert (decision.worker, decision.hit_tokens) == ("w0", len(second.plan.hashes or ()) * 16)


async def test_a_clock_at_the_end_costs_no_more_than_its_line() -> None:
    desk = Desk("rewrite", ("volatile-tail",))

    await desk.send(clock_line("10:14"))
    second = await desk.send(clock_line("10:15"))

    text = second.plan.inbound.body["messages"][0]["content"]
    assert text == f"{HANDBOOK}\nCurrent time: 2026-11-30 10:15"
    assert desk.dispatcher.choose(second.plan).hit_tokens >= len(HANDBOOK)


@pytest.mark.parametrize("mode", ["off", "observe"])
async def test_bytes_pass_untouched_unless_rewriting(mode: Mode) -> None:
    desk = Desk(mode)

    for raw in (
        billing("1a2b3"),
        clock_line("10:14"),
        body([], tools=TOOLS),
        body([], tools=TOOLS[::-1]),
    ):
        rewrite = await desk.send(raw)
        assert rewrite.raw is raw
        assert rewrite.rules == ()
        assert rewrite.plan.inbound.body == orjson.loads(raw)


async def test_only_named_rules_rewrite() -> None:
    desk = Desk("rewrite", ())

    assert (await desk.send(billing("1a2b3"))).rules == ()
    assert (await desk.explain(billing("1a2b3"))).report == ()


async def test_completions_are_never_rewritten() -> None:
    raw = b'{"model":"m","prompt":"x-anthropic-billing-header: cc_version=1;\\nq","messages":[]}'
    desk = Desk("rewrite")

    rewrite = await desk.rewriter.plan(
        desk.dispatcher, desk.pool, inbound(raw, surface="completions"), raw
    )

    assert rewrite.raw is raw


async def test_tenants_of_one_pool_keep_their_own_orders() -> None:
    desk = Desk("rewrite", ("stable-tools",))
    first, second = body([], tools=TOOLS), body([], tools=TOOLS[::-1])

    await desk.send(first, "acme")
    await desk.send(second, "globex")

    assert (await desk.send(second, "acme")).raw == first
    assert (await desk.send(first, "globex")).raw == second


async def test_a_rule_does_not_apply_where_the_bytes_as_sent_are_held_further() -> None:
    desk = Desk("rewrite", ("attribution-header",))
    raw = billing("1a2b3")
    sent = await desk.dispatcher.plan(desk.pool, inbound(raw), in_full=True)
    hold(desk.pool, "w3", sent.prompt)

    rewrite = await desk.rewriter.plan(desk.dispatcher, desk.pool, inbound(raw), raw)
    explained = await desk.explain(raw)

    assert rewrite.raw is explained.raw is raw
    assert rewrite.rules == explained.rules == ()
    assert report_of(explained, "attribution-header")["applied"] is False
    assert report_of(explained, "attribution-header")["tokens_saved"] < 0
    assert desk.dispatcher.choose(rewrite.plan).worker == "w3"


def pool_that_prints_tools() -> Pool:
    tokenizer = byte_tokenizer()
    template = ChatTemplate(
        "{% if tools %}{{ tools | tojson }}<|im_end|>{% endif %}" + CHATML, special_tokens={}
    )
    reader = PromptReader(tokenizer, template, model="m", block_size=BLOCK)
    return make_pool(reads=False, reader=reader, index=Index(BLOCK))


@pytest.mark.parametrize(
    "raw",
    [billing("1a2b3"), clock_line("10:14"), body([{"role": "user", "content": "q"}], tools=TOOLS)],
    ids=["line", "clock", "tools"],
)
async def test_reuse_is_never_less_than_that_of_the_bytes_as_sent(raw: bytes) -> None:
    """Whatever share of either form the workers hold."""
    for share_as_sent, share_rewritten in product(range(5), repeat=2):
        pool = pool_that_prints_tools()
        desk = Desk("rewrite", pool=pool)
        await desk.rewriter.plan(
            desk.dispatcher, pool, inbound(body([], tools=TOOLS[::-1])), body([], tools=TOOLS[::-1])
        )
        sent = await desk.dispatcher.plan(pool, inbound(raw), in_full=True)
        other = await desk.rewriter.plan(desk.dispatcher, pool, inbound(raw), raw)
        assert other.rules
        rewritten = await desk.dispatcher.plan(pool, other.plan.inbound, in_full=True)
        hold_share(pool, "w1", sent, share_as_sent / 4)
        hold_share(pool, "w2", rewritten, share_rewritten / 4)

        rewrite = await desk.rewriter.plan(desk.dispatcher, pool, inbound(raw), raw)

        assert held_tokens(pool, rewrite.plan) >= held_tokens(pool, sent)
        # A tie is rewritten.
        if held_tokens(pool, rewritten) >= held_tokens(pool, sent):
            assert rewrite.rules


def hold_share(pool: Pool, worker: str, plan: Plan, share: float) -> None:
    assert pool.index is not None
    assert plan.prompt is not None
    hashes = plan.prompt.block_hashes
    pool.index.store(worker, hashes[: int(len(hashes) * share)], plan.prompt.root)


def held_tokens(pool: Pool, plan: Plan) -> int:
    assert pool.index is not None
    return max((hit.total for hit in pool.index.match(plan.hashes or ()).values()), default=0)


async def test_observing_tells_what_a_rule_would_save_without_sending_anything_else() -> None:
    desk = Desk("observe", ("attribution-header",))
    await desk.send(billing("1a2b3"))
    await desk.send(billing("2b3c4"))

    explained = await desk.explain(billing("9f8e7"))

    assert explained.rules == ()
    assert b"9f8e7" in explained.raw
    entry = report_of(explained, "attribution-header")
    assert (entry["applied"], entry["changed"]) == (False, "line")
    assert entry["tokens_saved"] >= len(HANDBOOK) - 64
    assert desk.rewriter.num_changed == {"attribution-header": 2}
    assert desk.rewriter.tokens_saved["attribution-header"] >= len(HANDBOOK) - 64
    assert (await desk.explain(billing("9f8e7"))).report == explained.report


async def test_observing_without_rules_looks_at_all_of_them() -> None:
    desk = Desk("observe", ())
    await desk.send(body([{"role": "user", "content": "q"}], tools=TOOLS))

    explained = await desk.explain(body([{"role": "user", "content": "q"}], tools=TOOLS[::-1]))

    assert [entry["rule"] for entry in explained.report] == list(RULES)
    assert report_of(explained, "stable-tools")["changed"] == "order"


async def test_observing_looks_at_a_sample_and_never_at_two_requests_at_once() -> None:
    desk = Desk("observe")
    for i in range(50):
        raw = billing(f"{i:05x}")
        await desk.rewriter.plan(desk.dispatcher, desk.pool, inbound(raw), raw)
    await desk.rewriter.settle()

    assert desk.rewriter.num_changed == {"attribution-header": 1}


async def test_explaining_keeps_no_order() -> None:
    desk = Desk("rewrite", ("stable-tools",))

    await desk.explain(body([], tools=TOOLS[::-1]))

    assert (await desk.send(body([], tools=TOOLS))).rules == ()


async def test_a_pool_without_a_tokenizer_rewrites_what_needs_no_template() -> None:
    desk = Desk("rewrite", pool=make_pool(reads=False))

    assert (await desk.send(billing("1a2b3"))).rules == ("attribution-header",)
    assert (await desk.send(clock_line("10:14"))).rules == ()
    refused = report_of(await desk.explain(clock_line("10:14")), "volatile-tail")
    assert refused == {
        "rule": "volatile-tail",
        "applied": False,
        "tokens_saved": 0,
        "refused": "template",
    }
