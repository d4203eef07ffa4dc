"""The miss report: what is a loss, whose, how large, and that looking for it stays cheap."""

from __future__ import annotations

import asyncio
import json
from array import array
from dataclasses import replace
from itertools import count, pairwise
from random import Random
from typing import Any

import pytest

from gateway.misses.causes import ADVICE, Cause
from gateway.misses.compare import known_tokens, shared_blocks
from gateway.misses.memory import Memory
from gateway.misses.metrics import MissCollector
from gateway.misses.report import COMPARED_SHARE, MAX_QUEUE, MissReport
from gateway.routing.dispatch import Outcome, Usage
from gateway.telemetry.requests import Telemetry
from tests.gateway.miss_parts import HANDBOOK, Shop, message, reader, tool
from tests.gateway.routing_parts import BLOCK


def conversation(turns: int, *, start: int = 0, system: str = HANDBOOK) -> list[dict[str, Any]]:
    """System text and the turns from ``start`` on, the last one without an answer."""
    messages = [message("system", system)]
    for turn in range(start, turns):
        messages.append(message("user", f"Question {turn}: what about orders of kind {turn * 13}?"))
        if turn < turns - 1:
            messages.append(message("assistant", f"Answer {turn}: kind {turn * 13} is shipped."))
    return messages


async def test_a_growing_conversation_loses_nothing() -> None:
    shop = Shop()
    for turn in range(1, 12):
        await shop.serve(conversation(turn))

    assert await shop.causes() == {}
    assert shop.report.report()["totals"]["requests"] == 11


async def test_questions_about_one_document_lose_nothing() -> None:
    shop = Shop()
    for n in range(12):
        question = f"Number {n}: is class {n * 7} refunded, and if so until when, dear handbook?"
        await shop.serve([message("system", HANDBOOK), message("user", question)])

    assert await shop.causes() == {}


async def test_unrelated_prompts_lose_nothing() -> None:
    shop = Shop()
    for n in range(8):
        text = " ".join(f"{chr(97 + n) * 5}{k} is a word of text {n}." for k in range(60))
        await shop.serve([message("system", text), message("user", "q")])

    assert await shop.causes() == {}
    assert shop.report.report()["totals"]["compared"] == 8


async def test_a_clock_costs_what_stands_behind_it() -> None:
    shop = Shop()
    for minute in range(5):
        system = f"You are a support bot. It is 2026-11-30 10:{minute:02}. {HANDBOOK}"
        served = await shop.serve([message("system", system), message("user", "Refund window?")])

    row = (await shop.causes())["datetime"]
    assert row["segment"] == "system"
    assert row["requests"] == 4
    assert row["tokens_lost"] == pytest.approx(4 * served.missed_tokens, abs=4 * BLOCK)
    assert row["share"] == 1.0
    assert row["example"]["place"] == "messages[0].content"
    # The first minute differs in its last digit from the others.
    assert row["example"]["char"] == len("You are a support bot. It is 2026-11-30 10:0")
    assert row["advice"] == ADVICE[Cause.DATETIME]


@pytest.mark.parametrize(
    ("texts", "cause"),
    [
        (("Time 10:14 now.", "Time 10:15 now."), "datetime"),
        (("Time 9:59 now.", "Time 10:00 now."), "datetime"),
        (("Visitor 41 of today.", "Visitor 42 of today."), "counter"),
        (("Visitor 99 of today.", "Visitor 100 of today."), "counter"),
        (("Visitor Ann of today.", "Visitor Bob of today."), "system_text"),
        (("Visitor v2a of today.", "Visitor v3b of today."), "system_text"),
    ],
)
async def test_a_number_that_changed_is_named_by_its_shape(
    texts: tuple[str, str], cause: str
) -> None:
    shop = Shop()
    for text in texts:
        await shop.serve([message("system", f"{text} {HANDBOOK}"), message("user", "q")])

    assert list(await shop.causes()) == [cause]


async def test_tools_in_another_order_are_named_as_such() -> None:
    shop = Shop()
    tools = [tool(name) for name in ("search_docs", "read_file", "create_ticket")]
    messages = [message("system", HANDBOOK), message("user", "q")]
    await shop.serve(messages, tools=tools)
    served = await shop.serve(messages, tools=[tools[0], tools[2], tools[1]])

    row = (await shop.causes())["tool_order"]
    assert (row["segment"], row["example"]["place"]) == ("tools", "tools[1]")
    # The two moved tools and all behind them are known text; only punctuation is new.
    assert row["tokens_lost"] == pytest.approx(served.missed_tokens, abs=2 * BLOCK)


async def test_tools_printed_otherwise_are_not_taken_for_other_tools() -> None:
    shop = Shop()
    messages = [message("system", HANDBOOK), message("user", "q")]
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
    first = tool("search", properties=properties, required=["a", "b"])
    second = tool("search", properties=properties, required=["b", "a"])
    await shop.serve(messages, tools=[first])
    await shop.serve(messages, tools=[second])

    assert list(await shop.causes()) == ["tool_serialisation"]


async def test_another_set_of_tools_is_a_change() -> None:
    shop = Shop()
    messages = [message("system", HANDBOOK), message("user", "q")]
    await shop.serve(messages, tools=[tool("search"), tool("read")])
    await shop.serve(messages, tools=[tool("search"), tool("write")])

    assert list(await shop.causes()) == ["tools_changed"]


async def test_a_history_trimmed_from_the_front_costs_all_behind_the_gap() -> None:
    shop = Shop()
    await shop.serve(conversation(20))
    served = await shop.serve(conversation(21, start=4))

    row = (await shop.causes())["history_trimmed"]
    assert (row["segment"], row["example"]["place"]) == ("history", "messages[1]")
    new = len("Answer 19: kind 247 is shipped.") + len(
        "Question 20: what about orders of kind 260?"
    )
    assert row["tokens_lost"] == pytest.approx(served.missed_tokens - new, abs=4 * BLOCK)


async def test_a_conversation_that_went_on_is_found_by_its_last_messages() -> None:
    shop = Shop()
    for turn in range(1, 15):
        await shop.serve(conversation(turn))
        # Others talk under the same instructions.
        await shop.serve([message("system", HANDBOOK), message("user", f"Other question {turn}?")])
    await shop.serve(conversation(15, start=6))

    assert list(await shop.causes()) == ["history_trimmed"]


@pytest.mark.parametrize(
    ("edit", "cause", "place"),
    [
        (
            {"content": "Answer 0: it was changed afterwards."},
            "history_edit",
            "messages[2].content",
        ),
        ({"name": "bot", "content": None}, "history_edit", "messages[2].content"),
    ],
    ids=["text", "no text"],
)
async def test_an_edited_answer_is_an_edit(edit: dict[str, Any], cause: str, place: str) -> None:
    shop = Shop()
    messages = conversation(12)
    await shop.serve(messages)
    messages[2] = {**messages[2], **edit}
    await shop.serve(messages)

    row = (await shop.causes())[cause]
    assert row["example"]["place"] == place


async def test_text_put_between_known_messages_is_an_edit() -> None:
    shop = Shop()
    messages = conversation(12)
    await shop.serve(messages)
    await shop.serve([*messages[:3], message("user", "Remember: be brief!"), *messages[3:]])

    assert list(await shop.causes()) == ["history_edit"]


async def test_other_template_options_are_named() -> None:
    shop = Shop()
    await shop.serve(conversation(8), chat_template_kwargs={"style": "plain"})
    await shop.serve(conversation(8), chat_template_kwargs={"style": "grand"})

    row = (await shop.causes())["template_options"]
    assert (row["segment"], row["example"]["place"]) == ("template", "chat_template_kwargs")


async def test_a_template_that_prints_the_date_is_named() -> None:
    days = iter(["2026-11-30", "2026-12-01"])
    shop = Shop()
    shop.pool.reader = None
    for _ in range(2):
        shop.pool.reader = reader("Today: " + next(days) + "\n" + TEMPLATE_BODY)
        await shop.serve(conversation(8))

    assert list(await shop.causes()) == ["template_date"]


TEMPLATE_BODY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


async def test_an_evicted_prefix_is_no_broken_prefix() -> None:
    shop = Shop()
    await shop.serve(conversation(8))
    shop.held["w0"].clear()
    served = await shop.serve(conversation(9))

    row = (await shop.causes())["not_cached"]
    assert row["segment"] == "cache"
    assert 0 < row["tokens_lost"] <= served.missed_tokens


async def test_siblings_of_one_burst_lose_nothing() -> None:
    shop = Shop()
    plans = [await shop.serve(conversation(3)) for _ in range(1)]
    first = plans[0].plan
    # Both were decided before either was done.
    tickets = [shop.routes.admit(first, shop.routes.choose(first)) for _ in range(2)]
    shop.clock.now_s += 5.0
    shop.report = MissReport(clock=shop.clock, cpu_clock=lambda: 0.0)
    for ticket in tickets:
        ticket.first_token()
        ticket.finish(Outcome.OK, Usage(first.num_tokens, 1, 0))
        shop.report.observe(first, ticket)

    assert await shop.causes() == {}


async def test_tenants_are_not_compared_with_each_other() -> None:
    shop = Shop()
    for minute, tenant in enumerate(["a", "b", "a"]):
        system = f"It is 2026-11-30 10:{minute:02}. {HANDBOOK}"
        await shop.serve([message("system", system), message("user", "q")], tenant=tenant)

    row = (await shop.causes())["datetime"]
    assert [(by["tenant"], by["requests"]) for by in row["by"]] == [("a", 1)]


async def test_losses_are_told_apart_by_document() -> None:
    shop = Shop()
    for minute in range(4):
        system = f"It is 2026-11-30 10:{minute:02}. {HANDBOOK}"
        headers = {"x-document-id": "rules" if minute < 3 else "other"}
        await shop.serve([message("system", system), message("user", "q")], headers=headers)

    row = (await shop.causes())["datetime"]
    assert {by["document"]: by["requests"] for by in row["by"]} == {
        "document:rules": 2,
        "document:other": 1,
    }


async def test_no_text_of_a_prompt_is_in_the_report_unless_allowed() -> None:
    for allowed in (False, True):
        shop = Shop(options={"log_prompts": allowed})
        for name in ("Dana Reyes", "Omar Lund"):
            text = f"You are helping {name}. {HANDBOOK}"
            await shop.serve([message("system", text), message("user", "Refund?")])
        row = (await shop.causes())["system_text"]

        assert ("Omar" in json.dumps(row)) is allowed
        assert "Rule 2" not in json.dumps(row)


async def test_counters_have_bounded_labels_and_the_report_s_tokens() -> None:
    shop = Shop()
    for minute in range(3):
        system = f"It is 2026-11-30 10:{minute:02}. {HANDBOOK}"
        await shop.serve([message("system", system), message("user", "q")], tenant="secret")
    row = (await shop.causes())["datetime"]
    telemetry = Telemetry(clock=shop.clock)
    telemetry.register(MissCollector(shop.report))

    text = telemetry.render().decode()
    line = 'warmlane_miss_tokens_total{cause="datetime",pool="chat"}'
    assert f"{line} {float(row['tokens_lost'])}" in text
    assert "secret" not in text


async def test_a_cause_that_is_mended_leaves_the_report() -> None:
    shop = Shop()
    for minute in range(3):
        system = f"It is 2026-11-30 10:{minute:02}. {HANDBOOK}"
        await shop.serve([message("system", system), message("user", "q")])
    assert "datetime" in await shop.causes()
    shop.clock.now_s += 3600.0
    assert "datetime" in await shop.causes()
    shop.clock.now_s += 3600.0

    assert await shop.causes() == {}
    assert shop.report.tally.tokens["chat", Cause.DATETIME] > 0


async def test_more_than_can_be_compared_is_counted_not_queued() -> None:
    shop = Shop()
    shop.clock.now_s = 0.0
    frozen = MissReport(clock=lambda: 0.0)
    served = await shop.serve(conversation(2))
    for n in range(MAX_QUEUE + 44):
        served.plan.inbound.body["messages"][-1]["content"] = f"{n} is a number of its own kind"
        plan = await shop.routes.plan(shop.pool, served.plan.inbound, in_full=True)
        frozen.observe(plan, served.ticket)
    await frozen.settled()

    totals = frozen.report()["totals"]
    assert totals["compared"] + totals["not_compared"] == MAX_QUEUE + 44
    assert totals["not_compared"] >= 44
    await frozen.close()


async def test_comparing_takes_its_share_of_a_core_and_no_more() -> None:
    cpu = count(step=2.0)  # a second look at it is 2 s later: that much takes each comparison
    shop = Shop(options={"cpu_clock": lambda: next(cpu)})

    async def num_compared() -> int:
        before = int(shop.report.report()["totals"]["compared"])
        for _ in range(3):
            await shop.serve([message("system", f"{next(cpu)} " + HANDBOOK), message("user", "q")])
            await shop.report.settled()
        return int(shop.report.report()["totals"]["compared"]) - before

    assert await num_compared() == 1
    shop.clock.now_s += 1.0 / COMPARED_SHARE
    assert await num_compared() == 0
    # Its debt is paid, and all that the credit can hold is there.
    shop.clock.now_s += 6.0 / COMPARED_SHARE
    assert await num_compared() == 1
    assert shop.report.report()["totals"]["not_compared"] == 7


async def test_the_memory_is_bounded_in_tokens_and_keeps_the_newest() -> None:
    memory = Memory(max_tokens=20_000)
    shop = Shop(options={"memory": memory})
    for n in range(30):
        await shop.serve([message("system", f"Text {n} is here. " * 60), message("user", "q")])
        await shop.report.settled()

    assert memory.num_tokens <= 20_000
    assert 5 < len(memory) < 30
    newest = await shop.serve([message("system", "Text 29 is here. " * 60), message("user", "q")])
    assert newest.missed_tokens == 0
    assert await shop.causes() == {}


async def test_images_are_not_kept() -> None:
    memory = Memory()
    shop = Shop(options={"memory": memory})
    messages = conversation(3)
    served = await shop.serve(messages)
    await shop.report.settled()
    assert len(memory) == 1
    part = {"type": "image_url", "image_url": {"url": "data:" + "x" * 1000}}
    served.plan.inbound.body["messages"].append({"role": "user", "content": [part]})
    shop.report.observe(served.plan, served.ticket)
    await shop.report.settled()

    assert len(memory) == 0


ODD = {
    "no messages": {"messages": None},
    "a number": {"messages": 7},
    "what is no message": {"messages": [7, None, "x"]},
    "no messages at all": {"messages": []},
    "an odd role": {"messages": [{"role": ["a"], "content": "Long enough to count."}]},
    "odd content": {"messages": [{"role": {"a": 1}, "content": {"a": 1}}]},
    "odd parts": {"messages": [{"role": "user", "content": [{"type": ["a"]}, 7, None]}]},
    "odd text": {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
    "odd tools": {"messages": [], "tools": [7, None, {"function": 7}, {"function": {"name": []}}]},
    "odd calls": {"messages": [{"role": "assistant", "tool_calls": [7, {"function": None}]}]},
    "odd prompt": {"prompt": {"a": 1}},
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_an_odd_body_ends_nothing(odd: dict[str, Any]) -> None:
    """What an engine answers is observed, whatever the body; first, behind, and before others."""
    shop = Shop()
    served = await shop.serve(conversation(3))
    other = await shop.serve(conversation(3, system="Another. " + HANDBOOK))
    for each in (served, other):
        plan = each.plan
        body = plan.inbound.body
        for form in (odd, {**body, **odd}, body):
            plan.inbound.body = {"model": "m", **form}
            for report in (shop.report, MissReport(clock=shop.clock)):
                report.observe(plan, each.ticket)
                await report.settled()
                await report.close()
    await shop.serve(conversation(4))
    await shop.report.settled()

    totals = shop.report.report()["totals"]
    assert (totals["requests"], totals["failed"]) == (3 + 6, 0)


COUNTED_OTHERWISE = {
    "several choices": {"n": 2},
    "the best of several": {"best_of": 3},
    "the prompt's own probabilities": {"prompt_logprobs": 1},
    "an echo": {"echo": True},
    "several prompts": {"prompt": ["a", "b"]},
}


@pytest.mark.parametrize("fields", COUNTED_OTHERWISE.values(), ids=COUNTED_OTHERWISE)
async def test_hits_that_are_counted_otherwise_are_left_out(fields: dict[str, Any]) -> None:
    shop = Shop()
    served = await shop.serve(conversation(3))
    inbound = replace(served.plan.inbound, body=served.plan.inbound.body | fields)
    plan = await shop.routes.plan(shop.pool, inbound, in_full=True)
    shop.report.observe(plan, served.ticket)

    assert shop.report.report()["totals"]["requests"] == 1


async def test_a_request_that_hit_as_expected_is_compared_with_nothing() -> None:
    shop = Shop()
    served = [await shop.serve(conversation(turn, system=HANDBOOK * 5)) for turn in range(1, 25)]
    report = MissReport(clock=shop.clock, cpu_clock=lambda: 0.0)
    report.observe(served[0].plan, served[0].ticket)
    await report.settled()
    for each in served[1:]:
        report.observe(each.plan, each.ticket)

    assert report._task is None
    assert not report._queue
    await report.close()


async def test_a_predecessor_far_behind_is_no_loss() -> None:
    shop = Shop()
    messages = [message("system", HANDBOOK), message("user", "Tell me all.")]
    await shop.serve(messages)
    answer = " ".join(f"Answer {n} is no rule but a number {n * 31}." for n in range(200))
    await shop.serve([*messages, message("assistant", answer), message("user", "And now?")])

    assert await shop.causes() == {}


async def test_a_report_can_be_closed_in_the_middle() -> None:
    shop = Shop()
    for turn in range(3):
        await shop.serve([message("system", f"{turn} " + HANDBOOK), message("user", "q")])
    await shop.report.close()
    await asyncio.sleep(0)

    assert shop.report._task is None


async def test_what_a_report_reads_for_itself_stays_within_its_tenants_salt() -> None:
    """How soon a text is read tells whether it was read before."""
    shop = Shop()
    tools = [tool(f"look_up_{n}", note={"const": "x" * 200}) for n in range(9)]
    for turn in range(3):
        system = message("system", f"{turn} " + HANDBOOK)
        both = [system, message("user", "q")]
        offered = [*tools[:5], tools[5 + turn]]
        await shop.serve(both, tenant="t", salt="ours", tools=offered)
    await shop.report.settled()

    assert shop.report.report()["causes"]
    assert shop.pool.reader is not None
    # With which of the two before it the last one is compared, is up to the hashes of their text.
    mixed = [
        {"model": "m", "messages": both, "tools": [*tools[:5], tools[5 + turn]]}
        for turn in range(2)
    ]
    unknown = [shop.pool.reader.chat(body, salt="ours").unknown_chars for body in mixed]
    assert min(unknown) == 0
    assert all(shop.pool.reader.chat(body).unknown_chars > len(HANDBOOK) for body in mixed)


def test_shared_blocks_is_the_common_beginning() -> None:
    left = [bytes([n]) for n in range(50)]
    for common in range(51):
        right = left[:common] + [b"x"] * (50 - common)
        assert shared_blocks(left, right, 50) == common
        assert shared_blocks(left, right, 7) == min(common, 7)


def test_known_tokens_counts_each_run_once() -> None:
    a, b, new = range(100, 200), range(300, 360), range(1000, 1050)
    other = array("I", [*a, *new, *b])
    assert known_tokens(array("I", [*b, *a]), other) == 160
    assert known_tokens(array("I", [*b, *b]), other) == 60
    assert known_tokens(array("I", range(5000, 5100)), other) == 0
    assert known_tokens(array("I", [*range(9), *b]), other) == 60
    assert known_tokens(array("I"), other) == 0


@pytest.mark.parametrize("seed", range(20))
def test_known_tokens_finds_all_runs_in_any_order(seed: int) -> None:
    rng = Random(seed)
    cuts = sorted(rng.sample(range(40, 3000, 40), 20))
    other = array("I", range(3000))
    runs = [other[a:b] for a, b in pairwise(cuts)]
    rng.shuffle(runs)
    tokens = array("I")
    for n, run in enumerate(runs):
        tokens += run
        tokens += array("I", range(10_000 * (n + 1), 10_000 * (n + 1) + rng.randrange(3)))

    assert known_tokens(tokens, other) == sum(map(len, runs))
    assert known_tokens(other, tokens) == sum(map(len, runs))
