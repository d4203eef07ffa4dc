"""Reading prompts in known segments gives what reading them whole gives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from prefix_index import (
    ChatTemplate,
    PromptReader,
    PromptTokenizer,
    TemplateRefusedError,
    hash_blocks,
    root_hash,
)
from tests.prefix_index import capture
from tests.prefix_index.toy import build, prompt_tokenizer, special

B = 16
# What tokenizers trip over, and what user text may contain to look like the template's own.
AWKWARD = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|endoftext|>",
    "<|im_",
    "start|>",
    "e\u0301",
    "\u0301",
    "\r\n",
    "\n\n",
    "\x00",
    " ",
    "   ",
    "\t",
    "12 345",
    "½",
    "🙂",
    "👩\u200d👩\u200d👧",
    "\u200d",
    "\ufeff",
    "日本語",
    "don't",
    "http://a.b/c?d=e",
    "",
]
texts = st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=6)), max_size=6).map("".join)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="session")
def shared_reader(tokenizer: PromptTokenizer, template: ChatTemplate) -> PromptReader:
    """A reader that knows more and more, and forgets, as tests go on."""
    return PromptReader(tokenizer, template, model="m", block_size=B, max_memo_bytes=40_000)


@pytest.fixture
def reader(tokenizer: PromptTokenizer, template: ChatTemplate) -> PromptReader:
    return PromptReader(tokenizer, template, model="m", block_size=B)


def chat(*contents: str) -> dict[str, Any]:
    roles = ["system", *(["user", "assistant"] * len(contents))]
    return {
        "messages": [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=False)
        ]
    }


def numbered(num_messages: int, size: int = 40) -> list[str]:
    return [f"Message {at}: " + "lorem ipsum dolor " * size for at in range(num_messages)]


@pytest.mark.parametrize("name", [name for name in capture.CAPTURED if "gemma" not in name])
def test_recorded_chat_prompts_are_read_as_vllm_read_them(
    name: str, shared_reader: PromptReader
) -> None:
    exchanges = [each for each in capture.load(name).exchanges if "messages" in each.body]
    for exchange in exchanges:
        prompt = shared_reader.chat(exchange.body).complete()

        assert list(prompt.token_ids) == exchange.prompt_ids
        assert prompt.num_tokens == len(exchange.prompt_ids)


def test_there_are_33_recorded_chat_prompts() -> None:
    names = [name for name in capture.CAPTURED if "gemma" not in name]

    assert sum("messages" in e.body for name in names for e in capture.load(name).exchanges) == 33


@settings(
    max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(conversation=messages, generate=st.booleans())
def test_segments_encode_to_what_the_whole_text_encodes_to(
    conversation: list[dict[str, str]],
    generate: bool,
    shared_reader: PromptReader,
    template: ChatTemplate,
    tokenizer: PromptTokenizer,
) -> None:
    body = {"messages": conversation, "add_generation_prompt": generate}
    expected = tokenizer.encode(template.render(conversation, add_generation_prompt=generate))
    for _ in range(2):  # unknown or partly known, then known
        prompt = shared_reader.chat(body).complete()

        assert list(prompt.token_ids) == expected
        assert prompt.num_tokens == len(expected)
        assert prompt.block_hashes == hash_blocks(expected, B, prompt.root)
        assert prompt.segment_ends[-1] == len(expected)


@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_completion_text_encodes_to_what_the_engine_encodes(
    text: str, shared_reader: PromptReader, tokenizer: PromptTokenizer
) -> None:
    prompt = shared_reader.completion(text).complete()
    expected = tokenizer.encode(text, add_special_tokens=True)

    assert list(prompt.token_ids) == expected
    assert prompt.block_hashes == hash_blocks(expected, B, prompt.root)


def test_a_known_prompt_leaves_nothing_to_tokenize(reader: PromptReader) -> None:
    body = chat(*numbered(4))
    first = reader.chat(body)

    assert first.known_tokens == 0
    assert first.unknown_chars > 2000

    prompt = first.complete()
    again = reader.chat(body)

    assert (again.unknown_chars, again.known_tokens) == (0, prompt.num_tokens)
    assert again.complete() == prompt


def test_of_a_conversation_that_grew_only_the_new_turn_is_tokenized(
    reader: PromptReader, monkeypatch: pytest.MonkeyPatch, tokenizer: PromptTokenizer
) -> None:
    turns = numbered(6)
    reader.chat(chat(*turns[:4])).complete()
    encoded = watch(tokenizer, monkeypatch)
    reader.chat(chat(*turns)).complete()

    assert [text.count("Message") for text in encoded] == [1, 1]
    assert "Message 4" in encoded[0]
    assert "Message 5" in encoded[1]


def test_behind_a_changed_segment_known_text_is_not_tokenized_again(
    reader: PromptReader, monkeypatch: pytest.MonkeyPatch, tokenizer: PromptTokenizer
) -> None:
    turns = numbered(5)
    reader.chat(chat("It is 10:14.", *turns)).complete()
    encoded = watch(tokenizer, monkeypatch)
    later = reader.chat(chat("It is 10:15.", *turns))

    assert later.known_tokens == 0

    prompt = later.complete()

    assert encoded == ["<|im_start|>system\nIt is 10:15.<|im_end|>\n"]
    assert prompt.block_hashes == hash_blocks(prompt.token_ids, B, root_hash("m"))


def test_salts_and_adapters_have_their_own_blocks_and_tenants_share_no_known_text(
    reader: PromptReader, monkeypatch: pytest.MonkeyPatch, tokenizer: PromptTokenizer
) -> None:
    body = chat(*numbered(2))
    plain = reader.chat(body).complete()
    encoded = watch(tokenizer, monkeypatch)
    adapted = reader.chat(body, adapter="ad1").complete()

    assert encoded == []

    salted = reader.chat(body, salt="tenant-a")

    assert salted.known_tokens == 0

    tenant = salted.complete()

    assert len(encoded) == 3
    assert plain.token_ids == adapted.token_ids == tenant.token_ids
    assert tenant.root == root_hash("m", salt="tenant-a")
    assert adapted.root == root_hash("m", adapter="ad1")
    assert len({p.block_hashes[0] for p in (plain, adapted, tenant)}) == 3


def test_the_memo_is_bounded_and_forgets_the_ends_of_old_prompts_first(
    tokenizer: PromptTokenizer, template: ChatTemplate
) -> None:
    reader = PromptReader(tokenizer, template, model="m", block_size=B, max_memo_bytes=40_000)
    system = numbered(1)[0]
    for at in range(40):
        reader.chat(chat(system, f"Question {at}? " + "why " * 150)).complete()

        assert reader._memo.num_bytes <= 40_000

    latest = reader.chat(chat(system, "Question 39? " + "why " * 150))
    oldest = reader.chat(chat(system, "Question 0? " + "why " * 150))

    assert latest.unknown_chars == 0
    assert oldest.known_tokens > 100
    assert oldest.unknown_chars > 500


def test_threads_may_complete_drafts_of_one_reader_at_once(
    tokenizer: PromptTokenizer, template: ChatTemplate
) -> None:
    reader = PromptReader(tokenizer, template, model="m", block_size=B, max_memo_bytes=30_000)
    bodies = [chat("shared " * 50, f"{at % 7} " * 40, f"{at % 3} answer " * 20) for at in range(60)]
    expected = [tokenizer.encode(template.render(body["messages"])) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        prompts = list(pool.map(lambda body: reader.chat(body).complete(), bodies * 5))

    assert [list(prompt.token_ids) for prompt in prompts] == expected * 5


def test_a_completion_prompt_may_be_text_ids_or_several(reader: PromptReader) -> None:
    ids = list(range(5, 45))

    assert list(reader.completion(ids).complete().token_ids) == ids
    assert list(reader.completion([ids, [1]]).complete().token_ids) == ids
    assert reader.completion(["some text", "b"]).complete() == (
        reader.completion("some text").complete()
    )
    assert reader.completion(ids).unknown_chars == 0
    assert reader.completion(ids).complete().block_hashes == hash_blocks(ids, B, root_hash("m"))
    assert reader.completion([]).complete().num_tokens == 0
    assert reader.completion("").complete().num_tokens == 0


@pytest.mark.parametrize(
    "prompt", [None, 3, 1.5, {"a": 1}, [-1], [2**32], [1, "a"], [None], [[None]], "\ud800", [1.5]]
)
def test_what_is_no_completion_prompt_is_refused(reader: PromptReader, prompt: Any) -> None:
    with pytest.raises(TemplateRefusedError):
        reader.completion(prompt)


BODIES: dict[str, dict[str, Any]] = {
    "no messages": {},
    "messages are null": {"messages": None},
    "half a surrogate pair": chat("\ud800"),
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "its own template": {**chat("a"), "chat_template": "{{ messages }}"},
    "variables that are text": {**chat("a"), "chat_template_kwargs": "x"},
    "both flags": {**chat("a"), "continue_final_message": True},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_chat_request_whose_prompt_cannot_be_known_is_refused(
    reader: PromptReader, body: dict[str, Any]
) -> None:
    with pytest.raises(TemplateRefusedError) as refused:
        reader.chat(body)

    # Users of the runner read it.
    assert "NotTextError" not in str(refused.value)


def test_what_is_not_text_is_named(reader: PromptReader) -> None:
    for kind, named in (("image_url", "image_url"), (None, "None"), (5, "5")):
        part = {"type": kind, "image_url": {"url": "data:,"}}
        with pytest.raises(TemplateRefusedError, match=f"type '{named}' is not text"):
            reader.chat({"messages": [{"role": "user", "content": [part]}]})


def test_without_a_template_chat_is_refused_and_completions_are_read(
    tokenizer: PromptTokenizer,
) -> None:
    reader = PromptReader(tokenizer, None, model="m", block_size=B)

    assert reader.completion("text").complete().num_tokens == 1
    with pytest.raises(TemplateRefusedError, match="no chat template"):
        reader.chat(chat("a"))


def test_request_variables_reach_the_template(tokenizer: PromptTokenizer) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{{ mode }}" + (
        "{{ reasoning_effort }}{% if tools %}{{ tools[0].n }}{% endif %}"
        "{% if documents %}{{ documents[0].t }}{% endif %}"
        "{% if add_generation_prompt %}G{% endif %}"
    )
    reader = PromptReader(
        tokenizer, ChatTemplate(source, special_tokens={}), model="m", block_size=B
    )
    body = {
        **chat("a"),
        "chat_template_kwargs": {"mode": "M"},
        "reasoning_effort": "high",
        "tools": [{"n": "T"}],
        "documents": [{"t": "D"}],
    }

    assert list(reader.chat(body).complete().token_ids) == tokenizer.encode("<|im_start|>aMhighTDG")


LAYOUTS = {
    "one mark per message": (
        "{% for m in messages %}<|a|>{{ m.role }}<|b|>{{ m.content }}{% endfor %}<|a|>assistant",
        [b"<|a|>"],
    ),
    "a mark for each role": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}<|a|>{{ m.content }}<|b|>{% else %}"
        "{{ m.content }}<|c|>{% endif %}{% endfor %}",
        [b"<|a|>", b"<|b|>"],
    ),
    "no marks": ("{% for m in messages %}{{ m.content }}{% endfor %}", []),
    "refuses the probe": ("{{ raise_exception('no') }}", []),
}


@pytest.mark.parametrize(("source", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_prompts_are_cut_where_the_template_separates_messages(
    source: str, expected: list[bytes]
) -> None:
    tokens: list[AddedToken] = [special("<|a|>"), special("<|b|>"), special("<|c|>")]
    tokenizer = prompt_tokenizer(build(*tokens, bos=True))
    template = ChatTemplate(source, special_tokens={})
    reader = PromptReader(tokenizer, template, model="m", block_size=4)

    assert reader._cuts == expected
    if "raise" not in source:
        body = chat("x <|b|> y", "<|a|><|c|>", " z ")
        prompt = reader.chat(body).complete()

        assert list(prompt.token_ids) == tokenizer.encode(template.render(body["messages"]))


def test_a_bos_is_there_once_in_chat_and_in_completion() -> None:
    tokenizer = prompt_tokenizer(build(special("<|a|>"), bos=True), bos_token="<s>")  # noqa: S106
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}<|a|>{{ m.content }}{% endfor %}",
        special_tokens=tokenizer.special_tokens,
    )
    reader = PromptReader(tokenizer, template, model="m", block_size=2)
    (bos,) = tokenizer.encode("<s>")
    for _ in range(2):
        for prompt in (
            reader.chat(chat("abc")).complete(),
            reader.completion("abc").complete(),
            reader.completion("<|a|>abc").complete(),
        ):
            assert list(prompt.token_ids).count(bos) == 1
            assert prompt.token_ids[0] == bos
            assert prompt.block_hashes == hash_blocks(prompt.token_ids, 2, root_hash("m"))


def watch(tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of all texts that are encoded from here on."""
    encoded: list[str] = []
    encode_many = tokenizer.encode_many

    def recorded(texts: list[str]) -> list[list[int]]:
        encoded.extend(texts)
        return encode_many(texts)

    monkeypatch.setattr(tokenizer, "encode_many", recorded)
    return encoded
