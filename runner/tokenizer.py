"""Where a tokenizer comes from: a Hugging Face folder, or the vocabulary inside a GGUF file.

Both end as the same two things, the text of a ``tokenizer.json`` and the dictionary of a
``tokenizer_config.json`` (with its chat template), since those are what the gateway reads too:
runner and gateway then tokenize with the very same bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from runner.gguf import GgufFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# GGUF `tokenizer.ggml.token_type` of a control token; these never come from user text's merges.
CONTROL_TOKEN_TYPE = 3

# Roles a special token can have: GGUF key suffix -> name in tokenizer_config.json.
SPECIAL_ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "padding": "pad_token",
    "unknown": "unk_token",
}


class TokenizerError(ValueError):
    """No usable tokenizer at the given place; the message says what is missing or unknown."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as the two files that define it.

    Attributes:
        tokenizer_json: Text of ``tokenizer.json``.
        config: Contents of ``tokenizer_config.json``; ``chat_template`` is in it when the model
            has one.
    """

    tokenizer_json: str
    config: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write both files into ``folder``, which must exist."""
        (folder / "tokenizer.json").write_text(self.tokenizer_json, encoding="utf-8")
        config = json.dumps(self.config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def read_tokenizer(path: Path) -> TokenizerFiles:
    """Read the tokenizer of the model at ``path``: a GGUF file, or a folder.

    In a folder ``tokenizer.json`` rules; only without one is ``model.gguf`` read.

    Raises:
        TokenizerError: If neither is there or the vocabulary is of an unknown kind.
        GgufError: If the GGUF file is damaged.
    """
    if path.is_file():
        return from_gguf(GgufFile(path).metadata)
    if (path / "tokenizer.json").is_file():
        return from_folder(path)
    if (path / "model.gguf").is_file():
        return from_gguf(GgufFile(path / "model.gguf").metadata)
    raise TokenizerError(f"no tokenizer.json and no model.gguf in {path}")


def from_folder(folder: Path) -> TokenizerFiles:
    """Read the files of a Hugging Face folder.

    A template in ``chat_template.jinja`` wins over the one in ``tokenizer_config.json``, as in
    transformers since 4.43.
    """
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        config["chat_template"] = template_file.read_text(encoding="utf-8")
    return TokenizerFiles((folder / "tokenizer.json").read_text(encoding="utf-8"), config)


def from_gguf(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """Build the two files from a GGUF file's metadata.

    Only byte-level BPE with the pre-tokenizer ``smollm`` is known: digits one by one, then
    GPT-2's pattern. (transformers' GGUF conversion drops the digit step and so splits a number
    after two blanks differently.)

    Raises:
        TokenizerError: If the vocabulary is of another kind.

    Source: llama.cpp, ``LLAMA_VOCAB_PRE_TYPE_SMOLLM``; equal on the captured vLLM prompts.
    """
    kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise TokenizerError(
            f"GGUF vocabulary (model, pre) = {kind} is unknown, expected ('gpt2', 'smollm'); "
            "put the file as model.gguf into a folder with the model's tokenizer.json"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    controls = [
        AddedToken(token, special=True, normalized=False)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == CONTROL_TOKEN_TYPE
    ]
    tokenizer.add_special_tokens(controls)
    config = _gguf_config(metadata, tokens)
    if config["add_bos_token"]:
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
        )
    return TokenizerFiles(tokenizer.to_str(), config)


def _gguf_config(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    }
    for role, name in SPECIAL_ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            config[name] = tokens[token_id]
    if (
        context := metadata.get(f"{metadata.get('general.architecture')}.context_length")
    ) is not None:
        config["model_max_length"] = context
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config
