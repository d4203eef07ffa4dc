from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from runner.detokenizer import Detokenizer, TokenTexts

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [
    "Plain words, then numbers 12 and 345.",
    "naïve café — “quotes” … ½",
    "日本語のテキストと漢字",
    "👩‍👩‍👧‍👦🇨🇭👍🏽 emoji of several code points",
    "مرحبا بالعالم שלום",
    " leading and   inner blanks\n\n\ttabs ",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    out = []
    for token_id in ids:
        out.append(detokenizer.push(token_id))
        if detokenizer.stopped_by is not None:
            return out
    return [*out, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_none_holds_half_a_character(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids

    got = pieces(Detokenizer(tokenizer), ids)

    assert "".join(got) == text
    assert all("\ufffd" not in piece for piece in got)


def test_any_token_sequence_decodes_as_in_one_go(tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 30))]

        assert "".join(pieces(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids)


def test_text_is_given_out_as_soon_as_it_is_final(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)

    assert [detokenizer.push(token_id) for token_id in ids] == ["one", " two", " three"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stop_string_at_every_place_cuts_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for start in range(len(text)):
        for size in (1, 3, 8):
            stop = text[start : start + size]
            detokenizer = Detokenizer(tokenizer, [stop])

            got = pieces(detokenizer, ids)

            assert "".join(got) == text[: text.index(stop)]
            assert detokenizer.stopped_by == stop


def test_text_that_only_began_like_a_stop_string_is_not_lost(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a END b ENDING EN", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer, ["ENDS", "ENDINGS"])

    assert "".join(pieces(detokenizer, ids)) == "a END b ENDING EN"
    assert detokenizer.stopped_by is None


def test_the_earliest_of_several_stop_strings_counts(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer, ["three four", "wo thr", "four"])

    assert "".join(pieces(detokenizer, ids)) == "one t"
    assert detokenizer.stopped_by == "wo thr"


def test_special_tokens_are_not_part_of_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi<|im_end|>", add_special_tokens=False).ids

    assert "".join(pieces(Detokenizer(tokenizer), ids)) == "hi"


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    texts = TokenTexts(tokenizer)

    assert b"".join(texts.bytes_of(token_id) for token_id in ids).decode() == text


def test_every_token_has_its_own_key(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)

    keys = {texts.key_of(token_id) for token_id in range(tokenizer.get_vocab_size())}

    assert len(keys) == tokenizer.get_vocab_size()
    assert texts.key_of(2) == "<|im_end|>"
