from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from runner.gguf import GgufFile
from runner.service import ModelFacts, PromptPipeline
from runner.tokenizer import TokenizerError, from_gguf, read_tokenizer

CAPTURES = Path(__file__).parents[1] / "data" / "vllm-kv-events"


@pytest.fixture(scope="module")
def metadata(smollm2_dir: Path) -> dict[str, Any]:
    return GgufFile(smollm2_dir / "model.gguf").metadata


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(from_gguf(metadata).tokenizer_json)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("  12", [256, 33, 34]),  # transformers' conversion gives [216, 216, 33, 34]
        ("<|im_start|>", [1]),
        ("<|im_end|>", [2]),
        ("", []),
    ],
)
def test_text_gets_the_ids_the_engine_rule_gives(
    tokenizer: Tokenizer, text: str, ids: list[int]
) -> None:
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids


@pytest.mark.parametrize(
    "text",
    [
        "a ½",
        "line\r\n1.",
        "  12 34",
        "日本語 и ملح",
        "👩‍👩‍👧‍👦 family",
        "\x00\x7f\u200b",
        "tab\tand  blanks ",
    ],
)
def test_every_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_all_control_tokens_are_special_and_keep_their_ids(
    tokenizer: Tokenizer, metadata: dict[str, Any]
) -> None:
    controls = [at for at, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]

    special = {at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    assert special == set(controls)
    assert len(special) == 17
    assert tokenizer.get_vocab_size() == 49_152


def test_config_has_template_and_special_tokens(smollm2_dir: Path) -> None:
    config = read_tokenizer(smollm2_dir / "model.gguf").config

    names = ("bos", "eos", "pad", "unk")

    assert [config[f"{name}_token"] for name in names] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
        "<|endoftext|>",
    ]
    assert config["add_bos_token"] is False
    assert "add_generation_prompt" in config["chat_template"]


def test_a_folder_is_read_as_it_was_written(smollm2_dir: Path, tmp_path: Path) -> None:
    from_file = read_tokenizer(smollm2_dir / "model.gguf")

    from_file.write(tmp_path)

    assert read_tokenizer(tmp_path) == from_file == read_tokenizer(smollm2_dir)


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (tmp_path / "chat_template.jinja").write_text("new")

    assert read_tokenizer(tmp_path).config["chat_template"] == "new"


def test_a_folder_with_only_weights_gives_their_vocabulary(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").symlink_to(smollm2_dir / "model.gguf")

    assert read_tokenizer(tmp_path) == read_tokenizer(smollm2_dir)


def test_an_unknown_vocabulary_is_named_with_the_way_out(metadata: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match=r"'tekken'.*llama-bpe.*tokenizer\.json"):
        from_gguf(metadata | {"tokenizer.ggml.pre": "tekken"})


# What the kinds cut differently, over what the generators find by themselves.
PIECES = ["  ", "12345", "I'LL", "don't", "\r\n", " é", "e\u0301", "a1b"]
TEXTS = (
    st.text()
    | st.text(alphabet=" \t\r\n'sStTlLdD019½²e\u0301\uff45日.,-!_")
    | st.lists(st.sampled_from(PIECES)).map("".join)
)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_the_kinds_of_other_models_cut_text_as_transformers_does(
    metadata: dict[str, Any], pre: str
) -> None:
    """With this vocabulary: how text is cut does not depend on it."""
    ours = Tokenizer.from_str(from_gguf(metadata | {"tokenizer.ggml.pre": pre}).tokenizer_json)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokens = {token: at for at, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    if pre == "qwen2":
        reference = Qwen2Tokenizer(vocab=tokens, merges=merges).backend_tokenizer
    else:
        reference = Tokenizer(BPE(vocab=tokens, merges=merges, ignore_merges=True))
        reference.pre_tokenizer = Sequence(
            [
                Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated"),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    @settings(max_examples=300, deadline=None)
    @given(text=TEXTS)
    def check(text: str) -> None:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected

    check()


def test_llama_texts_begin_with_a_token_unless_the_file_says_otherwise(
    metadata: dict[str, Any],
) -> None:
    llama = metadata | {"tokenizer.ggml.pre": "llama-bpe"}
    del llama["tokenizer.ggml.add_bos_token"]

    assert Tokenizer.from_str(from_gguf(llama).tokenizer_json).encode("hi").ids[0] == 1
    plain = llama | {"tokenizer.ggml.add_bos_token": False}
    assert Tokenizer.from_str(from_gguf(plain).tokenizer_json).encode("hi").ids[0] != 1


def test_tokens_a_model_was_given_later_are_found_whole_and_shown(
    metadata: dict[str, Any],
) -> None:
    at = metadata["tokenizer.ggml.tokens"].index("<reponame>")
    types = [*metadata["tokenizer.ggml.token_type"]]
    types[at] = 4

    files = from_gguf(metadata | {"tokenizer.ggml.token_type": types})

    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    ids = tokenizer.encode("a<reponame>b").ids
    assert at in ids
    assert tokenizer.decode(ids) == "a<reponame>b"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", None),
        ("tokens", [1, 2]),
        ("tokens", "abc"),
        ("merges", None),
        ("merges", ["ab"]),
        ("merges", ["xyzzy qqqq"]),
        ("token_type", None),
        ("token_type", [1]),
        ("token_type", 7),
        ("eos_token_id", 2**31),
        ("eos_token_id", "2"),
        ("bos_token_id", -1),
    ],
)
def test_a_damaged_vocabulary_is_refused_naming_the_key(
    metadata: dict[str, Any], key: str, value: Any
) -> None:
    with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{key}"):
        from_gguf(metadata | {f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_damaged_tokenizer_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode("latin-1"))

    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: expected"):
        read_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer"):
        read_tokenizer(tmp_path)


def captured_prompts() -> list[tuple[str, dict[str, Any], list[int]]]:
    """Path, body and prompt ids of every request that vLLM answered for this model."""
    found = []
    for file in sorted(CAPTURES.glob("vllm0.32-*.jsonl")):
        entries = [json.loads(line) for line in file.read_text().splitlines()]
        if entries[0]["model"] != "SmolLM2-135M-Instruct":
            continue
        asked = {entry["label"]: entry for entry in entries if entry["kind"] == "request"}
        for entry in entries:
            if entry["kind"] == "response" and entry.get("prompt_token_ids"):
                request = asked[entry["label"]]
                found.append((request["path"], request["body"], entry["prompt_token_ids"]))
    return found


async def test_prompts_get_the_ids_that_vllm_gave_them(smollm2_dir: Path) -> None:
    facts = ModelFacts("smollm2", "", 8192, 49_152, 16)
    prompts = PromptPipeline(read_tokenizer(smollm2_dir), facts)
    captured = captured_prompts()
    assert len([path for path, _, _ in captured if "chat" in path]) >= 20

    for path, body, ids in captured:
        if "chat" in path:
            assert await prompts.chat(body) == ids
        else:
            assert await prompts.completion(body["prompt"]) == ids


TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }} {{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}{% endfor %}"
)


async def test_tools_are_rendered_by_a_template_that_knows_them(smollm2_dir: Path) -> None:
    files = read_tokenizer(smollm2_dir)
    config = files.config | {"chat_template": TOOL_TEMPLATE}
    facts = ModelFacts("smollm2", "", 8192, 49_152, 16)
    prompts = PromptPipeline(replace(files, config=config), facts)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "no", "tool_call_id": "1"},
    ]

    ids = await prompts.chat({"messages": messages, "tools": [tool]})
    without = await prompts.chat({"messages": messages})

    text = Tokenizer.from_str(files.tokenizer_json).decode(ids, skip_special_tokens=False)
    assert text.startswith("<tool>weather {")
    assert '"parameters": {"type": "object"}' in text
    assert "assistant: [weather]" in text
    assert len(without) < len(ids)


def test_a_beginning_of_sequence_token_is_added_when_the_file_asks_for_it(
    metadata: dict[str, Any],
) -> None:
    files = from_gguf(metadata | {"tokenizer.ggml.add_bos_token": True})

    tokenizer = Tokenizer.from_str(files.tokenizer_json)

    assert files.config["add_bos_token"] is True
    assert tokenizer.encode("hi", add_special_tokens=True).ids[0] == 1
    assert tokenizer.encode("hi", add_special_tokens=False).ids[0] != 1
