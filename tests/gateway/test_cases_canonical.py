"""Bodies from public reports: what may be rewritten, and what must arrive byte for byte.

The names of the cases are those of the collection they come from.
"""

from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest

from gateway.proxy.splice import splice
from prefix_index.canonical import RULES
from prefix_index.chat import ChatTemplate
from tests.fakes.engine import RawEngine, openai_engine
from tests.fakes.gateway import Gateway, gateway
from tests.gateway.rewriting import (
    HANDBOOK,
    Desk,
    billing,
    held_tokens,
    inbound,
    pool_that_prints_tools,
    report_of,
)

JSON = {"content-type": "application/json"}
Q = '"messages":[{"role":"user","content":"q"}]'
SCHEMA = (
    '{"type":"object","properties":{"zeta_reason":{"type":"string"},"apple_label":{"type":"string",'
    '"enum":["no","yes"]},"mango_score":{"type":"number","minimum":0.0}},'
    '"required":["zeta_reason","apple_label","mango_score"]}'
)
JUDGE = '{"type":"function","function":{"name":"judge","strict":true,"parameters":' + SCHEMA + "}}"
SEARCH = '{"type":"function","function":{"name":"search_docs","description":"Find passages"}}'
READ = '{"type":"function","function":{"name":"read_file","description":"Read a file"}}'
TICKET = '{"type":"function","function":{"name":"create_ticket"}}'


def desk(mode: Any = "rewrite", rules: tuple[str, ...] = RULES) -> Desk:
    return Desk(mode, rules, pool=pool_that_prints_tools())


async def prompt_text(at: Desk, raw: bytes) -> str:
    assert at.pool.reader is not None
    return at.pool.reader.render(orjson.loads(raw))


async def post(gw: Gateway, raw: str | bytes) -> tuple[int, dict[str, Any]]:
    status, body, _ = await gw.post(data=raw, headers=JSON)
    return status, orjson.loads(body)


async def test_p04_without_the_rule_the_billing_line_is_forwarded_as_sent() -> None:
    at = desk("observe")
    first, second = billing("1a2b3"), billing("9f8e7")

    assert (await at.send(first)).raw is first
    sent = await at.rewriter.plan(at.dispatcher, at.pool, inbound(second), second)

    assert sent.raw is second
    assert held_tokens(at.pool, sent.plan) < 128
    saved = report_of(await at.explain(billing("00000")), "attribution-header")["tokens_saved"]
    assert saved >= len(HANDBOOK) - 128


async def test_p04_with_the_rule_both_system_texts_are_equal_and_the_segment_is_reused() -> None:
    at = desk()

    await at.send(billing("1a2b3"))
    planned = await at.rewriter.plan(
        at.dispatcher, at.pool, inbound(billing("9f8e7")), billing("9f8e7")
    )

    system = planned.plan.inbound.body["messages"][0]["content"]
    assert system == [{"type": "text", "text": HANDBOOK}]
    assert held_tokens(at.pool, planned.plan) >= len(HANDBOOK)
    assert planned.rules == ("attribution-header",)


@pytest.mark.parametrize("shift", range(6))
async def test_p07_a_flipped_tool_order_is_the_same_set_and_goes_out_as_first_seen(
    shift: int,
) -> None:
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    tools = (SEARCH, READ, TICKET)
    bodies = [
        f'{{"model":"m",{Q},"tools":[{",".join(tools[i] for i in order)}],"seed":1}}'.encode()
        for order in orders[shift:] + orders[:shift]
    ]
    at, keeping = desk(), desk("observe")

    rewrites = [await at.send(raw) for raw in bodies]
    kept = [await keeping.send(raw) for raw in bodies]

    assert {rewrite.raw for rewrite in rewrites} == {bodies[0]}
    assert [rewrite.rules for rewrite in rewrites] == [(), *[("stable-tools",)] * 5]
    planned = await at.explain(bodies[-1])
    assert held_tokens(at.pool, planned.plan) == len(planned.plan.hashes or ()) * 16
    # As sent, and said to differ in order only.
    assert [rewrite.raw for rewrite in kept] == bodies
    reports = [report_of(await keeping.explain(raw), "stable-tools") for raw in bodies]
    assert len({report["tool_set"] for report in reports}) == 1
    assert [report.get("changed") for report in reports] == [None, *["order"] * 5]


P09_TOOLS = (
    b'[{"type":"function","function":{"name":"search_docs","description":"Find passages",'
    b'"parameters":{"type":"object","properties":{"query":{"type":"string"}},'
    b'"required":["query"]}}}]',
    b'[ {"function": {"parameters": {"required":["query"], "properties": {"query": {"type": '
    b'"string"}}, "type": "object"}, "description": "Find passages", "name": "search_docs"}, '
    b'"type": "function"} ]',
)
P09_AROUND = (
    b'{"model":"m","messages":[{"role":"user","content":"q"}],"tools":%s}',
    b'{ "tools" : %s,\n "messages" : [ {"content":"q","role":"user"} ], "model":"m" }',
)
P09 = tuple(around % tools for around, tools in zip(P09_AROUND, P09_TOOLS, strict=True))


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
async def test_p09_other_key_order_and_white_space_share_their_blocks(
    first: int, second: int
) -> None:
    at = desk()

    sent, again = await at.send(P09[first]), await at.send(P09[second])

    assert sent.raw == P09[first]
    # The tools are those first seen; around them nothing has moved.
    assert again.raw == P09_AROUND[second] % P09_TOOLS[first]
    assert list(again.plan.hashes or ()) == list(sent.plan.hashes or ()) != []


async def test_p09_without_the_rule_two_prompts_are_two_prompts() -> None:
    at = desk("observe")

    first, second = await at.send(P09[0]), await at.send(P09[1])

    assert list(first.plan.hashes or ()) != list(second.plan.hashes or ())
    report = report_of(await at.explain(P09[1]), "stable-tools")
    assert (report["applied"], report["changed"]) == (False, "serialisation")


async def test_p09_the_key_order_of_messages_has_no_influence() -> None:
    at = desk("off")
    messages = ('{"role":"user","content":"q"}', '{"content":"q","role":"user"}')
    bodies = [f'{{"model":"m","messages":[{message}]}}'.encode() for message in messages]

    plans = [(await at.send(raw)).plan for raw in bodies]

    assert plans[0].prompt is not None
    assert plans[1].prompt is not None
    assert plans[0].prompt.token_ids == plans[1].prompt.token_ids


SCHEMA_HOLDERS = [
    '"response_format":{"type":"json_schema","json_schema":{"name":"out","schema":%s}}',
    '"guided_json":%s',
    '"structured_outputs":{"json":%s}',
    '"text":{"format":{"type":"json_schema","schema":%s}}',
    '"tool_choice":{"type":"function","function":{"name":"judge","x":%s}}',
    '"extra_body":{"tools":[%s]}',
]


@pytest.mark.parametrize("holder", SCHEMA_HOLDERS, ids=lambda holder: holder.split('"')[1])
async def test_c01_schemas_outside_the_tools_are_outside_canonicalisation(holder: str) -> None:
    at = desk()
    other = json.dumps(json.loads(SCHEMA), sort_keys=True, indent=1)
    for schema in (SCHEMA, other, SCHEMA):
        member = holder % schema
        tools = f'"tools":[{JUDGE},{SEARCH}]'
        flipped = f'"tools":[{SEARCH},{JUDGE}]'

        await at.send(f'{{"model":"m",{Q},{tools}}}'.encode())
        rewrite = await at.send(f'{{"model":"m",{Q},{member},{flipped}}}'.encode())

        assert rewrite.raw == f'{{"model":"m",{Q},{member},{tools}}}'.encode()
        assert rewrite.rules == ("stable-tools",)


async def test_c01_an_engine_sees_the_schema_in_the_order_sent() -> None:
    raw = f'{{"model":"m",{Q},{SCHEMA_HOLDERS[0] % SCHEMA}}}'.encode()
    async with openai_engine() as engine, gateway(engine.url) as gw:
        await post(gw, raw)

    assert engine.seen[0].body == raw
    schema = engine.seen[0].json()["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == ["zeta_reason", "apple_label", "mango_score"]


async def test_c03_the_order_under_properties_is_never_another_ones() -> None:
    at = desk()
    function = json.loads(JUDGE)
    properties = function["function"]["parameters"]["properties"]
    choice = '"tool_choice":{"type":"function","function":{"name":"judge"}}'
    for names in (list(properties), sorted(properties), list(properties)[::-1]):
        function["function"]["parameters"]["properties"] = {n: properties[n] for n in names}
        raw = f'{{"model":"m",{Q},"tools":[{json.dumps(function)}],{choice}}}'.encode()

        rewrite = await at.send(raw)

        assert rewrite.raw is raw
        text = await prompt_text(at, rewrite.raw)
        assert [text.index(f'"{name}"') for name in names] == sorted(
            text.index(f'"{name}"') for name in names
        )


C05 = [
    *(b"9007199254740993", b"18446744073709551615", b"-9223372036854775808"),
    *(b"123456789012345678901234567890", b"1" + b"0" * 400, b"1.0", b"1e3", b"-0.0", b"0.10"),
]


@pytest.mark.parametrize("number", C05, ids=lambda number: number[:20].decode())
async def test_c05_numbers_keep_their_digits_through_every_rewrite(number: bytes) -> None:
    line = billing("1a2b3")[:-1].replace(b'"seed": 9007199254740993', b'"k": 1')
    raw = line + b', "seed": ' + number + b', "warmlane": {}}'

    rewrite = await desk().send(raw)
    spliced = splice(
        rewrite.raw,
        put={"model": b'"served"', "stream_options": b'{"include_usage":true}'},
        drop=("warmlane",),
    )

    assert rewrite.rules == ("attribution-header",)
    assert b', "seed": ' + number + b"," in spliced
    async with openai_engine() as engine, gateway(engine.url, aliases={"alias": "m"}) as gw:
        status, _ = await post(gw, raw.replace(b'"model": "m"', b'"model": "alias"'))
        assert status == 200
        assert engine.seen[0].body == splice(raw, drop=("warmlane",))


C07 = [("1.0", "1"), ("1e3", "1000"), ("-0.0", "0"), ("1.0", "1.5"), ("1e3", "1e4"), ("true", "1")]


@pytest.mark.parametrize(("first", "second"), C07)
async def test_c07_numbers_that_print_differently_are_different_prompts(
    first: str, second: str
) -> None:
    at = desk()
    raws = [
        f'{{"model":"m",{Q},"temperature":1.0,"tools":[{{"type":"function","function":'
        f'{{"name":"f","parameters":{{"properties":{{"x":{{"minimum":{n}}}}}}}}}}}]}}'.encode()
        for n in (first, second)
    ]

    rewrites = [await at.send(raw) for raw in raws]

    assert [rewrite.raw for rewrite in rewrites] == raws
    prompts = [rewrite.plan.prompt for rewrite in rewrites]
    assert prompts[0] is not None
    assert prompts[1] is not None
    assert prompts[0].token_ids != prompts[1].token_ids
    for raw in raws:
        # What an engine in Python prints of the bytes it gets.
        assert json.dumps(json.loads(raw)["tools"]) in await prompt_text(at, raw)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("escape", ["\\ud800", "\\udc97", "\\uDFFF\\uD800", "\\ud83d"])
async def test_c09_a_lone_surrogate_is_refused_and_leaves_no_damage(
    escape: str, is_stream: bool
) -> None:
    stream = '"stream":true,' if is_stream else ""
    bad = f'{{"model":"m",{stream}"messages":[{{"role":"user","content":"bad {escape} end"}}]}}'
    async with openai_engine() as engine, gateway(engine.url) as gw:
        status, document = await post(gw, bad)
        assert (status, document["error"]["type"]) == (400, "invalid_request_error")
        assert (await post(gw, f'{{"model":"m",{Q}}}'))[0] == 200

    assert len(engine.seen) == 1


def nested(num_levels: int) -> str:
    schema = '{"type":"object","properties":{"a":' * num_levels + "{}" + "}}" * num_levels
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'
    return f'{{"model":"m",{Q},"tools":[{tool}]}}'


@pytest.mark.parametrize("num_levels", [1_000, 10_000, 25_000])
async def test_c11_a_schema_nested_too_deep_is_refused_with_the_limit(num_levels: int) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        started_s = time.thread_time()
        status, document = await post(gw, nested(num_levels))
        assert time.thread_time() - started_s < 1
        assert (status, document["error"]["code"]) == (400, "json_too_deep")
        assert "1024" in document["error"]["message"]
        assert (await post(gw, f'{{"model":"m",{Q}}}'))[0] == 200


@pytest.mark.parametrize("num_levels", [10, 90, 110, 300, 500])
async def test_c11_nesting_within_the_limit_is_forwarded_and_rules_do_not_choke(
    num_levels: int,
) -> None:
    raw = nested(num_levels).encode()
    at = desk()

    for _ in range(2):
        rewrite = await at.rewriter.plan(at.dispatcher, at.pool, inbound(raw), raw)
        assert rewrite.raw is raw
        assert (await at.explain(raw)).raw is raw
    # An engine that does not parse: Python's own parser gives up at about 1,000 levels.
    async with RawEngine() as engine, gateway(engine.url) as gw:
        assert (await post(gw, raw))[0] == 200
    assert engine.seen[0].body == raw


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(
    "member",
    [
        '"temperature":%s',
        '"tools":[{"type":"function","function":{"name":"f","parameters":{"default":%s}}}]',
        '"messages":[{"role":"user","content":"q","x":[%s]}]',
    ],
)
async def test_c13_nan_and_infinity_are_not_json(literal: str, member: str) -> None:
    async with RawEngine() as engine, gateway(engine.url) as gw:
        status, document = await post(gw, f'{{"model":"m",{Q},{member % literal}}}')

    assert (status, document["error"]["code"]) == (400, "invalid_json")
    assert "JSON" in document["error"]["message"]
    assert engine.seen == []


async def test_c15_tools_are_rendered_in_the_order_sent_without_escapes_for_html() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "zeta",
            "description": 'Search "docs" & <files> — été',
            "parameters": {"type": "object", "properties": {}},
        },
    }
    template = ChatTemplate("{{ tools[0] | tojson }}", special_tokens={})

    text = template.render([{"role": "user", "content": "q"}], tools=[tool])

    assert text == (
        '{"type": "function", "function": {"name": "zeta", "description": "Search \\"docs\\" & '
        '<files> — été", "parameters": {"type": "object", "properties": {}}}}'
    )


C17 = [
    "Contract version effective 2026-01-01, id 7f0c1f2e-2f0b-4a55-9b1e-3d0b7a3c9d10. ",
    "Contract version effective 2026-07-01, id 0b9a6a34-91d7-4c0e-8f5b-55a0a1c2e9f7. ",
]


@pytest.mark.parametrize("end", ["", "\n"], ids=["in a line with text", "in a line of its own"])
@pytest.mark.parametrize("mode", ["off", "observe", "rewrite"])
async def test_c17_dates_and_ids_that_are_content_stay_and_no_hit_reaches_over_them(
    mode: str, end: str
) -> None:
    at = desk(mode)
    raws = [
        orjson.dumps(
            {
                "model": "m",
                "messages": [
                    {"role": "system", "content": text + end + HANDBOOK},
                    {"role": "user", "content": "Which version?"},
                ],
            }
        )
        for text in C17
    ]

    first = await at.send(raws[0])
    second = await at.rewriter.plan(at.dispatcher, at.pool, inbound(raws[1]), raws[1])
    second = await at.explain(raws[1])

    assert (first.raw, second.raw) == (raws[0], raws[1])
    date_at = (await prompt_text(at, raws[1])).index("2026-07")
    assert held_tokens(at.pool, second.plan) <= date_at + len("2026-0")
    assert (first.plan.hashes or [b""])[-1] != (second.plan.hashes or [b""])[-1]


C19 = [
    '"tools":[{"type":"function","function":{"name":"f","description":null,"strict":null,'
    '"parameters":{}}}],"tool_choice":null,"stop":null',
    '"tools":[{"type":"function","function":{"name":"f","parameters":{}}}]',
    '"tools":[{"type":"function","function":{"name":"f","description":null}}]',
    '"tools":[]',
    '"tools":null',
    '"tools":{},"tool_choice":{},"stop":[]',
]


async def test_c19_null_and_empty_are_forwarded_as_sent_and_never_taken_for_absent() -> None:
    at = desk()
    raws = [f'{{"model":"m",{Q},{members}}}'.encode() for members in C19]
    async with openai_engine() as engine, gateway(engine.url) as gw:
        for raw in (*raws, *raws[::-1]):
            assert (await at.send(raw)).raw is raw
            await post(gw, raw)

    assert [seen.body for seen in engine.seen] == [*raws, *raws[::-1]]
    assert '"description": null, "strict": null, "parameters": {}' in await prompt_text(at, raws[0])
