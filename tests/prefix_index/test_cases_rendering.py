"""Public reports of prefixes lost between body and tokens: each is a kind of mistake, kept out.

A test is named after what it keeps right; the identifiers in its comment are those of the reports.
Golden ids were made with transformers from trl 1.16.0's templates and public tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest

from prefix_index import Prompt, PromptReader, TemplateRefusedError, usable_blocks
from prefix_index.engines import EngineKind
from tests import zoo

KINDS: tuple[EngineKind, ...] = ("vllm", "sglang", "runner", "openai")
TEMPLATES = {
    "qwen3": "qwen3",
    "qwen2_5": "qwen3",
    "llama3_1": "llama3_1",
    "llama3_2": "llama3_1",
    "gemma3": "gemma3",
    "gptoss": "gptoss",
    "deepseekv3": "deepseek_v3",
}
HANDBOOK = "Handbook rule 7: refunds are accepted within thirty days of delivery. " * 120


def reader(
    template: str, engine: EngineKind = "vllm", *, block_size: int = 16, **options: Any
) -> PromptReader:
    tokens = TEMPLATES[template]
    return PromptReader(
        zoo.tokenizer(tokens),
        zoo.template(template, tokens, **options),
        model="m",
        block_size=block_size,
        engine=engine,
    )


def read(source: PromptReader, body: dict[str, Any] | str) -> Prompt:
    parsed = json.loads(body) if isinstance(body, str) else body
    return source.chat(parsed).complete()


def digest(ids: Sequence[int]) -> str:
    return sha256(",".join(map(str, ids)).encode()).hexdigest()


def common(first: Sequence[Any], second: Sequence[Any]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def ask(content: Any, **others: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **others}


SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search_docs",
        "description": "Find passages",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}


def reordered(value: Any) -> Any:
    """Return a JSON value with the keys of all its objects in reverse order."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


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


THOUGHTLESS = {"chat_template_kwargs": {"enable_thinking": False}}
FIRST_TURN = [
    {"role": "system", "content": "You answer from the handbook."},
    {"role": "user", "content": "What is the refund window?"},
]
SECOND_TURN = [
    *FIRST_TURN,
    {"role": "assistant", "content": "Thirty days."},
    {"role": "user", "content": "And for shoes?"},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_what_only_the_last_turn_has_is_not_counted_as_shared(
    kind: EngineKind, block_size: int
) -> None:
    """P13: Qwen3 prints an empty thought behind the last turn only."""
    source = reader("qwen3", kind, block_size=block_size)
    first = read(source, {"messages": FIRST_TURN, **THOUGHTLESS})
    second = read(source, {"messages": SECOND_TURN, **THOUGHTLESS})

    assert source.render({"messages": FIRST_TURN, **THOUGHTLESS}).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert [digest(first.token_ids), digest(second.token_ids)] == [
        "97c3a7c6158b1a9e69d739fe640b5f01f5223796314042c2893b8a2112758196",
        "c499961bc77a2c69498c0cd06baaebcefaf37255c1d7a3e051b1caf2a946bf6d",
    ]
    assert (first.num_tokens, second.num_tokens) == (29, 46)
    assert common(first.token_ids, second.token_ids) == 25
    assert common(first.block_hashes, second.block_hashes) == 25 // block_size
    thinking = read(source, {"messages": FIRST_TURN})
    assert thinking.num_tokens == 25


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


BOS = {"llama3_1": "<|begin_of_text|>", "gemma3": "<bos>"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BOS)
def test_a_beginning_of_sequence_is_there_once(name: str, kind: EngineKind) -> None:
    """P17: the template prints one, so chat text is tokenized without; a completion gets one."""
    source = reader(name, kind)
    (bos,) = zoo.tokenizer(name).encode(BOS[name])
    chat = list(read(source, ask("Hi")).token_ids)
    plain = list(source.completion("Hi").complete().token_ids)
    doubled = list(source.completion(f"{BOS[name]}Hi").complete().token_ids)
    bare = list(source.completion("Hi", add_special_tokens=False).complete().token_ids)

    assert (chat[0], chat.count(bos)) == (bos, 1)
    assert plain == [bos, *bare]
    # A text that brings its own gets another one: engines do that as well.
    assert doubled == [bos, *plain]


def test_llamas_chat_prompt_has_the_golden_ids() -> None:
    """P17."""
    ids = [128000, 128006, 9125, 128007, 271, 38766, 1303, 33025, 2696, 25, 6790, 220, 2366, 18]
    ids += [198, 15724, 2696, 25, 220, 1627, 10263, 220, 2366, 19, 271, 128009, 128006, 882]
    ids += [128007, 271, 13347, 128009, 128006, 78191, 128007, 271]
    for kind in KINDS:
        assert list(read(reader("llama3_1", kind), ask("Hi")).token_ids) == ids


def test_vllm_adds_a_beginning_of_sequence_to_chat_when_asked() -> None:
    """P17: ``add_special_tokens`` of a chat body is an engine's own switch."""
    chat = list(read(reader("llama3_1"), ask("Hi")).token_ids)

    assert list(read(reader("llama3_1"), ask("Hi", add_special_tokens=True)).token_ids) == [
        128000,
        *chat,
    ]


DATED = {
    "llama3_2": (
        19,
        42,
        "84c4fcb0db50996c4f55fe82c76b976c77159100c6d4204e30eea6a4f4b57dda",
        "c67265984f7d196d5ffd78da27727819f19413c86d53a38cdb0318a7eb7c4b2e",
    ),
    "gptoss": (
        33,
        81,
        "3b023b3267d30f6ed9e1cba770776f204a53592cb8c58f5afb3cc9784715a601",
        "c0025c8d4a50f0ee8fbb5a6195d86a6a83b0b152d7b466b8f712306e9a31703f",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DATED)
def test_a_date_in_the_template_is_that_of_the_engines_zone(name: str, kind: EngineKind) -> None:
    """P23: at the engine's midnight the prompt changes, at the gateway's it does not."""
    shared, num_tokens, november, december = DATED[name]
    body = {"messages": [FIRST_TURN[0], {"role": "user", "content": "q"}]}
    now_s = 0.0

    def clock() -> float:
        return now_s

    there = reader(name, kind, block_size=1, timezone="UTC", clock=clock)
    oslo = reader(name, kind, block_size=1, timezone="Europe/Oslo", clock=clock)
    prompts = []
    for at in ("2026-11-30T22:59:58Z", "2026-11-30T23:00:03Z", "2026-12-01T00:00:03Z"):
        now_s = datetime.fromisoformat(at).timestamp()
        prompts.append((read(there, body), read(oslo, body)))

    digests = [tuple(digest(prompt.token_ids) for prompt in pair) for pair in prompts]
    assert digests == [(november, november), (november, december), (december, december)]
    before, after = prompts[0][1], prompts[1][1]
    assert before.num_tokens == after.num_tokens == num_tokens
    # Nothing is predicted past the date.
    assert common(before.block_hashes, after.block_hashes) == shared


def test_a_template_says_whether_it_prints_the_date() -> None:
    """P23: so that an operator can be told."""
    prints = {name: zoo.template(name, "qwen3").prints_date for name in ("llama3_2", "qwen3")}

    assert prints == {"llama3_2": True, "qwen3": False}


BLANKS = ["{} ", " {}", "\n{}\n\n", "{}\t"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", BLANKS)
@pytest.mark.parametrize(
    ("name", "is_trimmed"), [("llama3_1", True), ("gemma3", True), ("qwen3", False)]
)
def test_blanks_around_a_message_count_where_the_template_keeps_them(
    name: str, is_trimmed: bool, form: str, kind: EngineKind
) -> None:
    """P25."""
    source = reader(name, kind, block_size=1)
    bare = read(source, ask("Refund window?"))
    padded = read(source, ask(form.format("Refund window?")))

    assert (padded.block_hashes == bare.block_hashes) == is_trimmed


PIECES = [
    "You answer from the handbook.",
    "\n\nDOC 1: refunds within thirty days.\n",
    "\n\nQuestion: the year 20",
    "26 report?",
]


def test_a_prompt_is_tokenized_as_a_whole_however_it_came_to_be() -> None:
    """P28: parts tokenized one by one are other tokens."""
    whole = [2675, 4320, 505, 279, 76349, 382, 32564, 220, 16, 25, 73618, 2949, 27219, 2919, 4286]
    whole += [14924, 25, 279, 1060, 220, 2366, 21, 1934, 30]
    tokens = zoo.tokenizer("llama3_1")
    source = reader("llama3_1")

    assert tokens.encode("".join(PIECES)) == whole
    assert sum(map(tokens.encode, PIECES), []) != whole  # noqa: RUF017
    completed = source.completion("".join(PIECES), add_special_tokens=False).complete()
    assert list(completed.token_ids) == whole


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "gptoss", "deepseekv3"])
def test_where_known_text_ends_leaves_the_tokens_as_they_are(name: str) -> None:
    """P28: whatever was read before, the ids are those of the whole text."""
    text = "".join(PIECES)
    bounds = [sum(map(len, PIECES[:n])) for n in range(len(PIECES) + 1)]
    for cut in (*bounds[1:-1], 5, len(text) - 3):
        source = reader(name)
        read(source, ask(text[:cut]))
        read(source, {"messages": [{"role": "system", "content": text[:cut]}, *SECOND_TURN[1:]]})
        for body in (
            ask(text),
            {"messages": [{"role": "system", "content": text}, *SECOND_TURN[1:]]},
        ):
            expected = zoo.tokenizer(TEMPLATES[name]).encode(source.render(body))
            assert list(read(source, body).token_ids) == expected


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


@pytest.mark.parametrize("block_size", [16, 64])
def test_text_that_was_generated_is_part_of_a_key_only_once_it_is_sent(block_size: int) -> None:
    """P32: of a follow-up only the blocks of the first prompt are known, not of its answer."""
    source = reader("gptoss", block_size=block_size)
    first = source.completion(f"{HANDBOOK} Q1:").complete()
    second = source.completion(f"{HANDBOOK} Q1: (answer text of request 1)  Q2:").complete()

    shared = common(first.block_hashes, second.block_hashes)
    assert shared == len(first.block_hashes) >= usable_blocks(first.num_tokens, block_size)
    assert second.num_tokens > first.num_tokens


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


def test_prompts_that_differ_share_exactly_what_their_tokens_share() -> None:
    """P09 to P37: a block is shared if and only if every token up to its end is."""
    bodies = [
        {"messages": FIRST_TURN},
        {"messages": SECOND_TURN},
        {"messages": SECOND_TURN, **THOUGHTLESS},
        {"messages": SECOND_TURN, "tools": [SEARCH]},
        {"messages": [{"role": "system", "content": HANDBOOK}, *SECOND_TURN[1:]]},
        {"messages": [{"role": "system", "content": HANDBOOK + "!"}, *SECOND_TURN[1:]]},
    ]
    for name in ("qwen3", "gptoss"):
        for kind in KINDS:
            source = reader(name, kind)
            prompts = [read(source, body) for body in bodies]
            for first, second in pairwise(prompts):
                shared = common(first.block_hashes, second.block_hashes)
                assert shared == common(first.token_ids, second.token_ids) // 16
