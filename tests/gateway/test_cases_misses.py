"""Reported prompts that lost their prefix: what is said of each, and its whole kind."""

from __future__ import annotations

import json
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from gateway.doctor.diagnosis import diagnose
from gateway.doctor.table import table
from gateway.fleet.parity import ParityCheck
from gateway.fleet.probes import PROBES
from gateway.routing.pool import Pool, Worker
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.requests import Telemetry
from gateway.upstream.client import Upstream
from prefix_index.chat import ChatTemplate
from prefix_index.index import Index
from prefix_index.prompts import PromptReader
from tests.fakes.engine import RawEngine, Script, Seen, answer
from tests.gateway.miss_parts import TEMPLATE, Served, Shop, message, reader
from tests.gateway.routing_parts import BLOCK, byte_tokenizer

if TYPE_CHECKING:
    from prefix_index.engines import EngineKind

RULE = "Handbook rule 7: refunds are accepted within thirty days of delivery. "
BOOK = RULE * 120


async def ask(shop: Shop, system: Any, question: str = "hi", **body: Any) -> Served:
    return await shop.serve([message("system", system), message("user", question)], **body)


async def only_row(shop: Shop) -> dict[str, Any]:
    (row,) = (await shop.causes()).values()
    return row


CLOCKS = {
    "minutes in words": "Monday, November 30, 2026 10:{:02} AM",
    "seconds of ISO 8601": "2026-11-30T10:14:{:02}Z",
    "minutes with a zone": "2026-11-30 10:{:02} +02:00",
    "an epoch": "timestamp: 17963448{:02}",
    "a bare clock": "10:{:02}",
}


@pytest.mark.parametrize("clock", CLOCKS.values(), ids=CLOCKS)
@pytest.mark.parametrize("lead", ["", RULE * 4], ids=["at the start", "behind stable text"])
async def test_p01_a_clock_in_the_system_prompt(clock: str, lead: str) -> None:
    shop = Shop()
    before = f"{lead}You are a support bot. The current date and time is "
    for n in (14, 15):
        served = await ask(shop, f"{before}{clock.format(n)}. {BOOK}", "Refund window?")

    row = await only_row(shop)
    assert (row["cause"], row["segment"]) == ("datetime", "system")
    # The reuse ends at the block that holds the clock, and all of the handbook is behind it.
    char = len(before) + clock.index("{") + 1
    assert row["example"]["char"] == char
    assert served.ticket.observed_hit_tokens is not None
    assert served.ticket.observed_hit_tokens <= row["example"]["token"]
    assert len(BOOK) - BLOCK <= row["tokens_lost"] <= served.missed_tokens


async def test_p03_an_id_and_a_clock_at_the_first_token() -> None:
    shop = Shop()
    ids = ("7f0c1f2e-2f0b-4a55-9b1e-3d0b7a3c9d10", "0b9a6a34-91d7-4c0e-8f5b-55a0a1c2e9f7")
    for second, given in enumerate(ids):
        text = f"Request {given} at 2026-11-30T09:00:0{second}Z. {BOOK}"
        served = await ask(shop, text)

    row = await only_row(shop)
    assert (row["cause"], row["example"]["char"]) == ("uuid", len("Request "))
    assert served.ticket.observed_hit_tokens in (0, BLOCK)
    assert row["tokens_lost"] == pytest.approx(len(BOOK), abs=3 * BLOCK)
    # It is the position that costs, and the operator is told so.
    diagnosis = diagnose([], [], shop.report.report())
    assert "(start of the prompt)" in table(diagnosis)


@pytest.mark.parametrize(
    "header",
    [
        "x-anthropic-billing-header: cc_version=2.1.99.a1b; cc_entrypoint=cli; cch={};",
        "x-anthropic-billing-header: cc_version=2.1.99.{}; cc_entrypoint=cli; cch=1a2b3;",
    ],
    ids=["hash", "version"],
)
async def test_p04_a_billing_line_per_request(header: str) -> None:
    shop = Shop()
    missed = 0
    for code in ("1a2b3", "9f8e7", "00c4d"):
        parts = [header.format(code), f"You are a coding agent. {BOOK}"]
        missed = (
            await ask(shop, [{"type": "text", "text": text} for text in parts], "list files")
        ).missed_tokens

    row = await only_row(shop)
    assert (row["cause"], row["segment"], row["requests"]) == ("attribution_header", "system", 2)
    # A block around the code itself is new, and so is the last one.
    assert 2 * (missed - 3 * BLOCK) <= row["tokens_lost"] <= 2 * missed
    assert missed > len(BOOK)


def function(name: str, words: str, **parameters: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters)[:1],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": words, "parameters": schema},
    }


TOOLS = (
    function("search_docs", "Find passages", query="string", limit="integer"),
    function("read_file", "Read a file", path="string"),
    function("create_ticket", "Open a ticket", title="string"),
)


@pytest.mark.parametrize("order", list(permutations(range(3)))[1:], ids=str)
async def test_p07_tools_in_another_order(order: tuple[int, ...]) -> None:
    shop = Shop()
    await ask(shop, BOOK, "q", tools=list(TOOLS))
    served = await ask(shop, BOOK, "q", tools=[TOOLS[n] for n in order])

    row = await only_row(shop)
    assert (row["cause"], row["segment"]) == ("tool_order", "tools")
    moved = next(n for n in range(3) if order[n] != n)
    assert row["example"]["place"] == f"tools[{moved}]"
    assert row["tokens_lost"] == pytest.approx(served.missed_tokens, abs=4 * BLOCK)


async def test_p07_both_orders_and_a_clock_are_blamed_on_what_comes_first() -> None:
    """Two faults in one request: the first one breaks the prefix, wherever the template puts it."""
    behind = TEMPLATE.replace("{% if tools %}", "{% for x in [] %}{% endfor %}{% if tools %}")
    tools_last = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    )
    for template, cause in ((behind, "tool_order"), (tools_last, "datetime")):
        shop = Shop(read=lambda template=template: reader(template))  # type: ignore[misc]
        for n, tools in enumerate((TOOLS, TOOLS[::-1])):
            await ask(shop, f"Now: 2026-11-30 10:1{n}. {BOOK}", "q", tools=list(tools))

        assert list(await shop.causes()) == [cause]


ARGUMENTS = {
    "blanks": ('{"path": "/tmp"}', '{"path":"/tmp"}'),
    "line ends": ('{"path":"/tmp"}', '{\n "path": "/tmp"\n}'),
    "order": ('{"a":1,"path":"/tmp"}', '{"path":"/tmp","a":1}'),
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("engine", ["vllm", "runner", "openai"])
async def test_p15_echoed_arguments_with_other_spacing(
    engine: EngineKind, arguments: tuple[str, str]
) -> None:
    shop = Shop(read=lambda: reader(engine=engine))
    for text in arguments:
        call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": text}}
        await shop.serve(
            [
                message("user", "q"),
                message("assistant", "", tool_calls=[call]),
                {"role": "tool", "tool_call_id": "c1", "content": BOOK},
            ],
            tools=[TOOLS[1]],
        )

    causes = await shop.causes()
    parses = engine != "openai"
    if parses and json.dumps(json.loads(arguments[0])) == json.dumps(json.loads(arguments[1])):
        # The engine parses the text first, so both are one prompt.
        assert causes == {}
        return
    row = causes["tool_serialisation"]
    assert row["example"]["place"] == "messages[1].tool_calls[0]"
    assert row["tokens_lost"] == pytest.approx(len(BOOK), abs=6 * BLOCK)


async def check_against(ours: PromptReader, theirs: Any, engine: str = "vllm") -> ParityCheck:
    """Check the parity of a worker that tokenizes as ``theirs`` says."""

    def respond(seen: Seen) -> Script:
        return answer(json.dumps({"tokens": theirs(seen.json())}).encode())

    async with RawEngine(respond) as fake:
        upstream = Upstream(fake.url)
        worker = Worker("w0", fake.url, upstream=upstream)
        pool = Pool(
            "chat", models=["m"], engine=engine, reader=ours, index=Index(BLOCK), workers=[worker]
        )
        check = ParityCheck(pool, worker, upstream, resume=lambda: None)
        await check.check()
        upstream.close()
    return check


def tokens(source: PromptReader, body: dict[str, Any]) -> list[int]:
    draft = source.chat(body) if "messages" in body else source.completion(body["prompt"])
    return list(draft.complete().token_ids)


async def test_p17_a_second_bos_is_said_loudly() -> None:
    template = "<|im_end|>" + TEMPLATE
    ours = reader(template, "vllm")
    bos = tokens(ours, PROBES["chat"])[0]
    with capture_logs() as lines:
        check = await check_against(ours, lambda body: [bos, *tokens(ours, body)])

    assert check.value == 0
    (line,) = lines
    assert (line["log_level"], line["event"], line["position"]) == ("warning", "parity_diverged", 1)
    assert line["their_token"] == bos
    assert line["their_tokens"] == line["our_tokens"] + 1


@pytest.mark.parametrize("order", ["BA", "BCA", "CAB", "ACB"])
@pytest.mark.parametrize("hinted", [False, True], ids=["no hint", "documents named"])
async def test_p18_the_same_passages_in_another_order(order: str, hinted: bool) -> None:
    shop = Shop()
    docs = {
        name: "".join(f"Passage {n} of text {name} says so. " for n in range(40)) for name in order
    }
    headers = {"x-document-id": "a,b"} if hinted else {}
    for names in (sorted(order), order):
        passages = "\n".join(f'<doc id="{name}">{docs[name]}</doc>' for name in names)
        question = [message("user", f"{passages}\n\nWhat do they say?")]
        system = [message("system", "Answer from the documents.")]
        served = await shop.serve([*system, *question], headers=headers)

    row = await only_row(shop)
    assert row["cause"] == "passage_order"
    assert row["segment"] == ("knowledge" if hinted else "current")
    assert row["tokens_lost"] == pytest.approx(served.missed_tokens, abs=(len(order) + 2) * BLOCK)


async def test_p23_a_template_that_prints_the_date() -> None:
    template = "Today: {{ strftime_now('%d %b %Y') }}\n" + TEMPLATE
    now = 1_796_428_798.0
    shop = Shop()
    for second in (0.0, 86_400.0):
        tokenizer = byte_tokenizer()
        clock = lambda second=second: now + second  # noqa: E731
        dated = ChatTemplate(template, special_tokens=tokenizer.special_tokens, clock=clock)
        shop.pool.reader = PromptReader(tokenizer, dated, model="m", block_size=BLOCK)
        await ask(shop, BOOK, "q")

    row = await only_row(shop)
    assert (row["cause"], row["segment"]) == ("template_date", "template")
    assert row["tokens_lost"] == pytest.approx(len(BOOK), abs=4 * BLOCK)


@pytest.mark.parametrize("tools", [[], list(TOOLS[:2])], ids=["none", "fewer"])
async def test_p30_with_and_without_tools_are_two_prompts(tools: list[dict[str, Any]]) -> None:
    shop = Shop()
    await ask(shop, BOOK, "q", tools=list(TOOLS))
    await ask(shop, BOOK, "q", **({"tools": tools} if tools else {}))

    row = await only_row(shop)
    assert (row["cause"], row["segment"]) == ("tools_changed", "tools")


async def test_p37_a_list_of_parts_is_the_same_prompt_as_its_text() -> None:
    shop = Shop()
    await ask(shop, BOOK, "q")
    await ask(shop, [{"type": "text", "text": BOOK}], "q")

    assert await shop.causes() == {}


PASTES = {
    "into the last message": ["Use this context:\n" + BOOK + "\nQuestion: {}", "q1", "q2"],
    "behind the question": ["{}\n\nUse this context:\n" + BOOK, "q1", "q2"],
}


@pytest.mark.parametrize("paste", PASTES.values(), ids=PASTES)
async def test_p20_a_document_that_moves_with_the_last_message(paste: list[str]) -> None:
    shop = Shop()
    form, first, second = paste
    await shop.serve([message("user", form.format(first))])
    turn = [message("user", "q1"), message("assistant", "a1")]
    served = await shop.serve([*turn, message("user", form.format(second))])

    row = await only_row(shop)
    assert row["cause"] == "moved_text"
    assert row["tokens_lost"] == pytest.approx(len(BOOK), abs=4 * BLOCK)
    assert served.missed_tokens >= row["tokens_lost"]


@pytest.mark.parametrize(
    "names",
    [
        ("Dana Reyes (dana@example.test)", "Omar Lund (omar@example.test)"),
        ("Dana", "Dana Reyes"),
        ("customer of the gold plan", "customer of the basic plan"),
    ],
    ids=["names", "one name begins the other", "plans"],
)
async def test_p27_a_name_before_a_shared_document(names: tuple[str, str]) -> None:
    shop = Shop()
    with capture_logs() as lines:
        for name in names:
            text = f"You are helping {name}. {BOOK}"
            served = await ask(shop, text, "q", tenant="t1")
        row = await only_row(shop)

    assert (row["cause"], row["segment"]) == ("system_text", "system")
    assert row["example"]["char"] >= len("You are helping ")
    assert row["tokens_lost"] == pytest.approx(len(BOOK), abs=3 * BLOCK)
    assert row["tokens_lost"] <= served.missed_tokens
    # Nobody's name, and nothing of the document, is told.
    told = json.dumps([row, lines]) + table(diagnose([], [], shop.report.report()))
    assert not any(word in told for word in ("Dana", "Omar", "gold", "refunds"))


async def test_p32_generated_text_is_never_predicted_and_no_loss() -> None:
    shop = Shop()
    first = f"{BOOK}Q1:"
    one = await shop.serve(prompt=first)
    two = await shop.serve(prompt=f"{first} (answer text of request 1) Q2:")

    assert two.ticket.predicted_hit_tokens <= one.plan.num_tokens // BLOCK * BLOCK
    assert two.ticket.observed_hit_tokens == two.ticket.predicted_hit_tokens
    assert await shop.causes() == {}


def test_p32_predictions_stand_beside_reports_so_that_drift_shows() -> None:
    telemetry = Telemetry(clock=lambda: 0.0)
    record = RequestRecord("r", "completions", pool="chat", worker="w0", outcome="ok", attempts=1)
    record.prompt_tokens, record.predicted_hit_tokens, record.observed_hit_tokens = 2000, 1984, 1600
    telemetry.observe(record)

    text = telemetry.render().decode()
    at = '{pool="chat",worker="w0"}'
    assert f"warmlane_predicted_hit_tokens_total{at} 1984.0" in text
    assert f"warmlane_observed_hit_tokens_total{at} 1600.0" in text
    assert f"warmlane_hit_prediction_error_tokens_total{at} 384.0" in text


KINDS: tuple[EngineKind, ...] = ("vllm", "sglang", "openai")


@pytest.mark.parametrize("theirs", KINDS)
@pytest.mark.parametrize("ours", KINDS[:2])
async def test_p34_a_wrong_serialiser_of_tools_shows_as_a_divergence(
    ours: EngineKind, theirs: EngineKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines flatten lists of parts in their own ways too: only tools are asked about here.
    probes = {name: probe for name, probe in PROBES.items() if "tools" in probe}
    monkeypatch.setattr("gateway.fleet.parity.PROBES", probes)
    tool = {
        "type": "function",
        "function": {"description": "Find a rule.", "name": "find", "parameters": {}},
    }
    here, there = reader(engine=ours), reader(engine=theirs)
    body = {"messages": [message("user", "q")], "tools": [tool]}
    is_same = tokens(here, body) == tokens(there, body)
    assert is_same is (ours == theirs)
    with capture_logs() as lines:
        check = await check_against(here, lambda asked: tokens(there, asked), engine=ours)

    if ours == theirs:
        assert (check.value, lines) == (1, [])
        return
    assert check.value == 0
    (line,) = lines
    assert line["probe"] in probes
    assert "function" in line["text"]
