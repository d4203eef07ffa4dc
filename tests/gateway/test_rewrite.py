"""Which form of a request is planned and forwarded, and what is reported of the other."""

from __future__ import annotations

from itertools import product

import orjson
import pytest

from gateway.proxy.rewrite import Mode
from prefix_index.canonical import RULES
from tests.gateway.rewriting import (
    HANDBOOK,
    TOOLS,
    Desk,
    billing,
    body,
    clock_line,
    held_tokens,
    hold_share,
    inbound,
    pool_that_prints_tools,
    report_of,
)
from tests.gateway.routing_parts import (
    hold,
    make_pool,
)


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


async def test_the_form_as_sent_is_known_by_its_beginning_where_its_end_is_new() -> None:
    desk = Desk("rewrite", ("attribution-header",))
    earlier, raw = (billing("1a2b3", HANDBOOK * 2 + end * 500) for end in ("Rule A. ", "Rule B. "))
    sent = await desk.dispatcher.plan(desk.pool, inbound(earlier), in_full=True)
    hold(desk.pool, "w3", sent.prompt)

    rewrite = await desk.rewriter.plan(desk.dispatcher, desk.pool, inbound(raw), raw)

    assert rewrite.raw is raw
    assert held_tokens(desk.pool, rewrite.plan) >= len(HANDBOOK)


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
