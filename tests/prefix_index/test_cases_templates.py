"""Public reports of prefixes lost between template and tokens: each kind of mistake is kept out.

A docstring names the report. Golden ids were made with transformers from trl 1.16.0's templates and
public tokenizers.
"""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

import pytest

from prefix_index import usable_blocks
from prefix_index.engines import EngineKind
from tests import zoo
from tests.prefix_index.cases import (
    FIRST_TURN,
    HANDBOOK,
    KINDS,
    SEARCH,
    SECOND_TURN,
    TEMPLATES,
    THOUGHTLESS,
    ask,
    common,
    digest,
    read,
    reader,
)


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


@pytest.mark.parametrize("block_size", [16, 64])
def test_text_that_was_generated_is_part_of_a_key_only_once_it_is_sent(block_size: int) -> None:
    """P32: of a follow-up only the blocks of the first prompt are known, not of its answer."""
    source = reader("gptoss", block_size=block_size)
    first = source.completion(f"{HANDBOOK} Q1:").complete()
    second = source.completion(f"{HANDBOOK} Q1: (answer text of request 1)  Q2:").complete()

    shared = common(first.block_hashes, second.block_hashes)
    assert shared == len(first.block_hashes) >= usable_blocks(first.num_tokens, block_size)
    assert second.num_tokens > first.num_tokens


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
