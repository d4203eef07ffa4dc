"""Public reports of prefixes lost in what engines make of a body: each kind of mistake is kept out.

A docstring names the report. Golden ids were made with transformers from trl 1.16.0's templates and
public tokenizers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefix_index import TemplateRefusedError
from prefix_index.engines import EngineKind
from tests.prefix_index.cases import (
    HANDBOOK,
    KINDS,
    SEARCH,
    ask,
    common,
    digest,
    read,
    reader,
    reordered,
)


def test_key_order_outside_a_schema_does_not_change_the_prompt() -> None:
    """P09: where the engine rewrites tools, the order in which a client spells them is gone."""
    body = ask("q", tools=[SEARCH])
    swapped = ask("q", tools=[dict(reversed(SEARCH.items()))])
    swapped["tools"][0]["function"] = dict(reversed(SEARCH["function"].items()))
    swapped["messages"] = [dict(reversed(body["messages"][0].items()))]
    for kind in ("vllm", "sglang"):
        source = reader("qwen3", kind)
        prompts = [
            read(source, text)
            for text in (
                json.dumps(body),
                json.dumps(swapped, indent=3),
                json.dumps(dict(reversed(swapped.items())), separators=(",", ":")),
            )
        ]

        assert prompts[0].block_hashes
        assert prompts[0].block_hashes == prompts[1].block_hashes == prompts[2].block_hashes
    as_sent = [read(reader("qwen3", "openai"), each) for each in (body, swapped)]
    assert as_sent[0].block_hashes != as_sent[1].block_hashes


@pytest.mark.parametrize("kind", KINDS)
def test_key_order_inside_a_schema_changes_the_prompt_as_it_does_on_the_engine(
    kind: EngineKind,
) -> None:
    """P09: no engine sorts what stands in ``parameters``, so neither do we."""
    source = reader("qwen3", kind)
    other = {**SEARCH["function"], "parameters": reordered(SEARCH["function"]["parameters"])}
    swapped = ask("q", tools=[{**SEARCH, "function": other}])

    assert read(source, ask("q", tools=[SEARCH])).block_hashes != read(source, swapped).block_hashes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("escaped", "raw"),
    [
        (r"Le caf\u00e9 est ferm\u00e9 \ud83d\ude00", "Le café est fermé 😀"),
        (r"a\/b \u0026 \u003c\u003e", "a/b & <>"),
        (r"\u65e5\u672c\u8a9e\u200d", "日本語\u200d"),
    ],
)
def test_escapes_in_the_body_do_not_change_the_prompt(
    escaped: str, raw: str, kind: EngineKind
) -> None:
    """P11: the same text is the same prompt, however its JSON is written."""
    form = '{"model":"m","messages":[{"role":"system","content":"%"},'
    form += '{"role":"user","content":"%"}]}'
    body = {"messages": [{"role": role, "content": raw} for role in ("system", "user")]}

    sent = form.replace("%", escaped)
    assert read(reader("qwen3", kind), sent) == read(reader("qwen3", kind), body)


def echoed(arguments: Any) -> dict[str, Any]:
    function = {"name": "read_file", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ]
    }


SPELLINGS = [
    ('{"path": "/tmp"}', '{"path":"/tmp"}'),
    ('{"a": 1, "b": [1, 2]}', '{ "a":1,\n"b":[1,2] }'),
    ('{"a": "é"}', '{"a": "\\u00e9"}'),
]


@pytest.mark.parametrize("spellings", SPELLINGS)
@pytest.mark.parametrize(
    ("kind", "is_one_prompt"),
    [("vllm", True), ("sglang", True), ("runner", True), ("openai", False)],
)
def test_the_spelling_of_echoed_arguments_matters_where_the_engine_prints_it(
    kind: EngineKind, is_one_prompt: bool, spellings: tuple[str, str]
) -> None:
    """P15: engines that parse arguments print one prompt for all spellings, others do not."""
    bodies = [echoed(spelling) for spelling in spellings]
    before = json.dumps(bodies)
    first, second = (read(reader("qwen3", kind, block_size=1), body) for body in bodies)

    assert (first.block_hashes == second.block_hashes) == is_one_prompt
    assert json.dumps(bodies) == before
    if not is_one_prompt:
        at = common(first.token_ids, second.token_ids)
        ends = first.segment_ends
        assert ends[0] <= at < ends[1]  # in the second message, where the call is


def test_tools_that_the_engine_prints_are_in_the_key() -> None:
    """P30: with tools, without, and with tools that may not be called."""
    messages = [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": "q"}]
    bare = {"messages": messages}
    tools = {"messages": messages, "tools": [SEARCH]}
    unused = {**tools, "tool_choice": "none"}
    for kind, expected in (("vllm", tools), ("sglang", bare), ("runner", tools), ("openai", tools)):
        source = reader("qwen3", kind)

        assert read(source, bare).block_hashes != read(source, tools).block_hashes
        assert read(source, unused).block_hashes == read(source, expected).block_hashes


def test_each_engine_prints_tools_in_its_own_way() -> None:
    """P34: with the golden ids of vLLM's and SGLang's forms."""
    messages = [
        {"role": "system", "content": "Answer from the handbook."},
        {"role": "user", "content": "q"},
    ]
    sent = {"messages": messages, "tools": [SEARCH]}
    function = {key: SEARCH["function"][key] for key in ("parameters", "description", "name")}
    swapped = {"messages": messages, "tools": [{"function": function, "type": "function"}]}
    prompts = {
        kind: [read(reader("qwen3", kind, block_size=1), body) for body in (sent, swapped)]
        for kind in KINDS
    }

    for kind in ("vllm", "sglang"):
        assert prompts[kind][0].block_hashes == prompts[kind][1].block_hashes
    for kind in ("runner", "openai"):
        assert prompts[kind][0].block_hashes != prompts[kind][1].block_hashes
    vllm, sglang = prompts["vllm"][0], prompts["sglang"][0]
    assert (vllm.num_tokens, digest(vllm.token_ids)) == (
        149,
        "e648cf9449157e4b18d4e02ee855c9aa6cb919f9082f47f2023656bb33352edb",
    )
    assert (sglang.num_tokens, digest(sglang.token_ids)) == (
        153,
        "615b4535deaff655820a7d2f17d6924cc1f5feab442e65670f07447fd5517192",
    )
    assert common(vllm.token_ids, sglang.token_ids) == 53
    assert len({reader("qwen3", kind).fingerprint for kind in KINDS}) == 4


@pytest.mark.parametrize("name", ["qwen2_5", "deepseekv3", "gptoss", "qwen3"])
@pytest.mark.parametrize(
    ("kind", "joined"),
    [
        ("vllm", "hello\nthere"),
        ("sglang", "hello there"),
        ("runner", "hello\nthere"),
        ("openai", "hello\nthere"),
    ],
)
def test_a_list_of_texts_is_the_text_that_the_engine_makes_of_it(
    name: str, kind: EngineKind, joined: str
) -> None:
    """P37."""
    source = reader(name, kind, block_size=1)
    plain = read(source, ask("hello there"))
    one = read(source, ask([{"type": "text", "text": "hello there"}]))
    two = read(source, ask([{"type": "text", "text": text} for text in ("hello", "there")]))

    assert one.block_hashes == plain.block_hashes
    assert two.block_hashes == read(source, ask(joined)).block_hashes


NUMBERS = [
    ('"minimum":1.0,"maximum":1e3,"default":-0.0', '"minimum":1,"maximum":1000,"default":0'),
    ('"minimum":1E3', '"minimum":1000'),
    ('"default":9007199254740993', '"default":9007199254740992'),
    ('"default":0.1', '"default":0.10000000000000002'),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", NUMBERS)
def test_numbers_are_printed_as_a_python_engine_prints_them(
    pair: tuple[str, str], kind: EngineKind
) -> None:
    """C07: 1.0 is not 1, and 1e3 prints as 1000.0."""
    form = (
        '{"messages":[{"role":"user","content":"q"}],"tools":[{"type":"function","function":'
        '{"name":"f","parameters":{"type":"object","properties":{"x":{"type":"number",%s}}}}}]}'
    )
    source = reader("qwen3", kind, block_size=1)
    texts = [source.render(json.loads(form % numbers)) for numbers in pair]
    printed = json.dumps(json.loads("{" + pair[0] + "}"))[1:-1]

    assert printed in texts[0]
    assert texts[0] != texts[1]
    first, second = (read(source, form % numbers) for numbers in pair)
    assert first.block_hashes != second.block_hashes


def test_a_negative_zero_and_an_exponent_keep_their_form() -> None:
    """C07."""
    schema = json.loads('{"minimum":1.0,"maximum":1e3,"default":-0.0}')
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for kind in KINDS:
        text = reader("qwen3", kind).render(ask("q", tools=[tool]))
        assert '{"minimum": 1.0, "maximum": 1000.0, "default": -0.0}' in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [r"\ud800", r"\udc97", r"a \udbff", r"\udc00\ud800"])
@pytest.mark.parametrize(
    "form",
    [
        '{"messages":[{"role":"user","content":"bad %s end"}]}',
        '{"messages":[{"role":"user","content":[{"type":"text","text":"%s"}]}]}',
        '{"messages":[{"role":"user","content":"q"}],"tools":[{"type":"function","function":'
        '{"name":"f","description":"%s"}}]}',
    ],
)
def test_half_a_surrogate_pair_is_refused_and_does_no_damage(
    form: str, half: str, kind: EngineKind
) -> None:
    """C09."""
    source = reader("qwen3", kind)
    with pytest.raises(TemplateRefusedError):
        read(source, form % half)

    assert read(source, ask("ok")).num_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1_000, 10_000])
def test_a_schema_that_is_nested_too_deep_to_print_is_refused(depth: int, kind: EngineKind) -> None:
    """C11: and one that is not, is printed."""
    source = reader("qwen3", kind)

    def nested(levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(levels):
            schema = {"type": "object", "properties": {"a": schema}}
        function = {"name": "f", "parameters": schema}
        return ask("q", tools=[{"type": "function", "function": function}])

    with pytest.raises(TemplateRefusedError, match="RecursionError"):
        read(source, nested(depth))
    assert source.render(nested(100)).count('"properties"') == 100
    assert read(source, ask("ok")).num_tokens > 0


def test_json_in_a_prompt_is_neither_sorted_nor_escaped() -> None:
    """C15: with the golden ids."""
    function = {
        "name": "zeta",
        "description": 'Search "docs" & <files> — été',
        "parameters": {"type": "object", "properties": {}},
    }
    body = ask("q", tools=[{"type": "function", "function": function}])
    for kind in ("vllm", "runner", "openai"):
        source = reader("qwen3", kind)
        prompt = read(source, body)

        assert (prompt.num_tokens, digest(prompt.token_ids)) == (
            137,
            "53404e3c07ed8ca8cceaba195d31a1fd79c9f7e93632399b5dd0c5702aa53fcc",
        )
        assert (
            '{"type": "function", "function": {"name": "zeta", "description": "Search '
            '\\"docs\\" & <files> — été", "parameters": {"type": "object", "properties": {}}}}'
        ) in source.render(body)


def test_null_and_nothing_and_an_empty_object_are_what_the_engine_makes_of_them() -> None:
    """C19: None prints as null; no tools are no tools, written as null or as an empty list."""
    function = {"name": "f", "description": None, "strict": None, "parameters": {}}
    nulls = ask("q", tools=[{"type": "function", "function": function}], tool_choice=None)
    printed = {
        "vllm": '{"name": "f", "description": null, "parameters": {}}',
        "runner": '{"name": "f", "description": null, "strict": null, "parameters": {}}',
        "openai": '{"name": "f", "description": null, "strict": null, "parameters": {}}',
    }
    for kind in KINDS:
        source = reader("qwen3", kind)
        without = read(source, ask("q")).block_hashes

        assert read(source, ask("q", tools=[])).block_hashes == without
        assert read(source, ask("q", tools=None, stop=None)).block_hashes == without
        if kind in printed:
            assert printed[kind] in source.render(nulls)
        else:
            with pytest.raises(TemplateRefusedError):  # answered with 400 there
                source.render(nulls)
