"""Where a tokenizer comes from: a Hugging Face folder, or the vocabulary inside a GGUF file.

Both end as the same two things, the text of a ``tokenizer.json`` and the dictionary of a
``tokenizer_config.json`` (with its chat template), since those are what the gateway reads too:
runner and gateway then tokenize with the very same bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from runner.gguf import GgufFile
from runner.vocabularies import VOCABULARIES, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# GGUF `tokenizer.ggml.token_type` of tokens that never come from merges: control tokens, and those
# that a model was given later, such as marks around tool calls.
CONTROL_TOKEN_TYPE, USER_TOKEN_TYPE = 3, 4

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

    Raises:
        TokenizerError: If the configuration is damaged.
    """
    config_file = folder / "tokenizer_config.json"
    try:
        config = json.loads(config_file.read_bytes()) if config_file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{config_file}: expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{config_file}: expected a JSON object")
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        config["chat_template"] = template_file.read_text(encoding="utf-8")
    return TokenizerFiles((folder / "tokenizer.json").read_text(encoding="utf-8"), config)


def from_gguf(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """Build the two files from a GGUF file's metadata: byte-level BPE of a known kind.

    Raises:
        TokenizerError: If the vocabulary is of another kind or lacks something.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    vocabulary = VOCABULARIES.get(str(pre))
    if model != "gpt2" or vocabulary is None:
        raise TokenizerError(
            f"GGUF vocabulary (model, pre) = {(model, pre)} is unknown, expected 'gpt2' and one "
            f"of {', '.join(VOCABULARIES)}; put the file as model.gguf into a folder with the "
            "model's tokenizer.json"
        )
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_bpe(metadata, tokens, vocabulary))
    vocabulary.apply(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(tokenizer, metadata, tokens)
    config = _gguf_config(metadata, tokens, vocabulary)
    if config["add_bos_token"]:
        if (bos := config.get("bos_token")) is None:
            raise TokenizerError("tokenizer.ggml.bos_token_id is missing, but texts begin with it")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
        )
    return TokenizerFiles(tokenizer.to_str(), config)


def _bpe(metadata: Mapping[str, Any], tokens: list[str], vocabulary: Vocabulary) -> models.BPE:
    key = "tokenizer.ggml.merges"
    merges = []
    for merge in _texts(metadata, key):
        left, blank, right = merge.partition(" ")
        if not blank:
            raise TokenizerError(f"{key} has {merge!r}, expected two parts with a blank between")
        merges.append((left, right))
    try:
        return models.BPE(
            vocab={token: at for at, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=vocabulary.ignores_merges,
        )
    except Exception as error:  # the library has no narrower one
        raise TokenizerError(f"{key} does not fit tokenizer.ggml.tokens: {error}") from error


def _add_whole_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Add the tokens that are found in a text before it is cut."""
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.token_type must be a list of {len(tokens)} numbers")
    for kind, is_special in ((CONTROL_TOKEN_TYPE, True), (USER_TOKEN_TYPE, False)):
        whole = [
            AddedToken(token, special=is_special, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == kind
        ]
        if is_special:
            tokenizer.add_special_tokens(whole)
        else:
            tokenizer.add_tokens(whole)


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    texts = metadata.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TokenizerError(f"{key} is missing, expected a list of strings")
    return texts


def _gguf_config(
    metadata: Mapping[str, Any], tokens: list[str], vocabulary: Vocabulary
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", vocabulary.adds_bos)),
    }
    for role, name in SPECIAL_ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
                raise TokenizerError(
                    f"tokenizer.ggml.{role}_token_id is {token_id!r}, expected a token's number"
                )
            config[name] = tokens[token_id]
    if (
        context := metadata.get(f"{metadata.get('general.architecture')}.context_length")
    ) is not None:
        config["model_max_length"] = context
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config
