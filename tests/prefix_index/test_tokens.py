"""Token ids equal the engine's, with one BOS, and cuts are exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from prefix_index import PromptTokenizer, TokenizerFilesError
from tests.prefix_index.toy import build, prompt_tokenizer, special


def test_a_beginning_of_sequence_is_added_for_completions_only() -> None:
    tokenizer = prompt_tokenizer(build(bos=True))
    bos = tokenizer.encode("<s>")

    assert tokenizer.encode("ab", add_special_tokens=True) == bos + tokenizer.encode("ab")
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == (bos, [])
    assert len(bos) == 1


def test_smollm2_adds_nothing(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.prefix_ids == tokenizer.suffix_ids == []
    assert tokenizer.encode("  12") == [256, 33, 34]
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert tokenizer.special_tokens.get("bos_token") == "<|im_start|>"
    assert tokenizer.vocab_size == 49_152


def test_truncation_and_padding_saved_in_the_file_do_not_apply() -> None:
    saved = build()
    saved.enable_truncation(4)
    saved.enable_padding(length=16)
    tokenizer = prompt_tokenizer(saved)

    assert len(tokenizer.encode("abcdefgh")) == 8
    assert [len(ids) for ids in tokenizer.encode_many(["abcdefgh", "a"])] == [8, 1]


OVERLAPS = {
    "another one contains it": ("<|a|>", ["<|a|>", "x<|a|>"]),
    "another one goes on where it ends": ("<|a|>", ["<|a|>", "<|a|>x"]),
    "another one can end inside it": ("<|a|>", ["<|a|>", "##<"]),
}


@pytest.mark.parametrize(("cut", "contents"), OVERLAPS.values(), ids=OVERLAPS)
def test_a_token_that_another_one_can_swallow_is_no_cut(cut: str, contents: list[str]) -> None:
    tokenizer = prompt_tokenizer(build(*map(special, contents)))

    assert cut not in tokenizer.cut_tokens_in(f"{cut} some text")


@pytest.mark.parametrize(
    "token",
    [
        special("<|a|>", lstrip=True),
        special("<|a|>", single_word=True),
        AddedToken("<|a|>", special=True, normalized=True),
        AddedToken("<|a|>", special=False, normalized=False),
    ],
    ids=["takes blanks", "whole words only", "normalized", "not special"],
)
def test_a_token_that_is_not_always_found_is_no_cut(token: AddedToken) -> None:
    assert prompt_tokenizer(build(token)).cut_tokens_in("<|a|>") == ()


def test_a_token_that_reaches_only_to_its_right_is_a_cut() -> None:
    tokenizer = prompt_tokenizer(build(special("<|a|>", rstrip=True), special("<|b|>")))

    assert tokenizer.cut_tokens_in("<|a|> x") == ("<|a|>",)


FRAGMENTS = ["<|a|>", "<|b|>", "<|a", "|>", " ", "  ", "\n", "a", "1", "é", "▁", "<s>", ""]
KINDS = [None, "first", "always", "normalizer"]
TOKENIZERS = {
    (prepend, strip): prompt_tokenizer(
        build(special("<|a|>", rstrip=strip), special("<|b|>"), prepend=prepend, bos=True)
    )
    for prepend in KINDS
    for strip in (False, True)
}


@given(st.sampled_from(list(TOKENIZERS)), st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_text_cut_before_such_tokens_encodes_to_the_same_ids(
    kind: tuple[str | None, bool], fragments: list[str]
) -> None:
    tokenizer = TOKENIZERS[kind]
    text = "".join(fragments)
    for token in tokenizer.cut_tokens_in("<|a|><|b|>"):
        head, *rest = text.split(token)
        pieces = [head, *(token + piece for piece in rest)]

        assert sum(tokenizer.encode_many(pieces), []) == tokenizer.encode(text)  # noqa: RUF017


def test_every_prefix_kind_leaves_cuts_but_one_that_depends_on_the_start() -> None:
    found = {
        kind: len(tokenizer.cut_tokens_in("<|a|><|b|>")) for kind, tokenizer in TOKENIZERS.items()
    }

    assert found == dict.fromkeys(TOKENIZERS, 2)


def test_a_folder_is_read_and_a_template_file_wins(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(build(special("<|a|>")).to_str())
    bare = PromptTokenizer.from_dir(tmp_path)

    assert bare.template_source is None
    assert bare.special_tokens == {}

    config = {"chat_template": "old", "eos_token": {"content": "<|a|>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    configured = PromptTokenizer.from_dir(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("new")
    overruled = PromptTokenizer.from_dir(tmp_path)

    assert configured.template_source == "old"
    assert configured.special_tokens == {"eos_token": "<|a|>"}
    assert overruled.template_source == "new"
    assert len({bare.fingerprint, configured.fingerprint, overruled.fingerprint}) == 3


def test_of_several_named_templates_the_default_is_taken() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]

    assert prompt_tokenizer(build(), chat_template=named).template_source == "d"
    assert prompt_tokenizer(build(), chat_template={"default": "d"}).template_source == "d"


def test_the_fingerprint_depends_on_content_alone() -> None:
    first = prompt_tokenizer(build(), chat_template="t", model_max_length=1)
    same = prompt_tokenizer(build(), chat_template="t", model_max_length=2)
    other = prompt_tokenizer(build(special("<|a|>")), chat_template="t")

    assert first.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json", '{"model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_says_so(text: str) -> None:
    with pytest.raises(TokenizerFilesError, match="not a tokenizer"):
        PromptTokenizer.from_parts(text, {})


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config.json": "{}"},
        {"tokenizer.json": "x", "tokenizer_config.json": "{"},
        {"tokenizer.json": "[1]", "tokenizer_config.json": "{}"},
    ],
)
def test_a_folder_that_cannot_be_read_says_which(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    with pytest.raises(TokenizerFilesError, match=tmp_path.name):
        PromptTokenizer.from_dir(tmp_path)
