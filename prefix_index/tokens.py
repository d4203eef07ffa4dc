"""Prompt text -> token ids, with the model's own tokenizer.

A beginning-of-sequence token is added exactly once: chat text is encoded without special tokens,
since the template prints its own, and completion text as the tokenizer's post-processor would.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tokenizers import AddedToken

# Names in tokenizer_config.json that transformers hands to templates as variables.
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Text on both sides of a cut where tokenizers differ most: blanks, line ends, marks, digits.
_CUT_PROBES = (("a", "b"), (" a  ", "  b "), ("é\r\n", "\n\n12"), ("", ""))


class TokenizerFilesError(ValueError):
    """The tokenizer's files are missing, damaged or not what they are named."""


class PromptTokenizer:
    """A tokenizer with what its files say about templates and special tokens.

    Encoding releases the GIL, so it may run in a worker thread while the event loop goes on.

    Attributes:
        template_source: The default chat template, None if the model has none.
        special_tokens: Template variables: name -> text (a list for the additional ones).
        prefix_ids: What the post-processor puts before a completion prompt (usually BOS).
        suffix_ids: What it puts behind.
        fingerprint: Hex identity of tokenizer, template and special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, config: Mapping[str, Any], fingerprint: str) -> None:
        self._tokenizer = tokenizer
        # Files saved from training may cut or pad; an engine encodes the whole text.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.template_source = _default_template(config.get("chat_template"))
        self.special_tokens = _special_tokens(config)
        self.fingerprint = fingerprint
        self.prefix_ids, self.suffix_ids = self._affixes()

    @classmethod
    def from_dir(cls, path: Path) -> PromptTokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        The latter two may be missing; a template file wins over the one in the config.

        Raises:
            TokenizerFilesError: If a file cannot be read or used.
        """
        try:
            tokenizer_json = (path / "tokenizer.json").read_text(encoding="utf-8")
            config_file = path / "tokenizer_config.json"
            config = (
                json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
            )
            if not isinstance(config, dict):
                raise TypeError("tokenizer_config.json is not an object")
            template_file = path / "chat_template.jinja"
            if template_file.exists():
                config["chat_template"] = template_file.read_text(encoding="utf-8")
        except (OSError, ValueError, TypeError) as error:
            raise TokenizerFilesError(f"cannot read the tokenizer in {path}: {error}") from error
        try:
            return cls.from_parts(tokenizer_json, config)
        except TokenizerFilesError as error:
            raise TokenizerFilesError(f"{path}: {error}") from error

    @classmethod
    def from_parts(cls, tokenizer_json: str, config: Mapping[str, Any]) -> PromptTokenizer:
        """Build from the text of ``tokenizer.json`` and the parsed ``tokenizer_config.json``.

        Raises:
            TokenizerFilesError: If the text is no tokenizer.
        """
        try:
            tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerFilesError(f"not a tokenizer.json: {error}") from error
        identity = [config.get("chat_template"), _special_tokens(config)]
        digest = blake2b(tokenizer_json.encode(), digest_size=16)
        digest.update(json.dumps(identity, sort_keys=True).encode())
        return cls(tokenizer, config, digest.hexdigest())

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of one text."""
        # encode() keeps the GIL (130 ms for 29k tokens); encode_batch_fast() does not.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
            0
        ].ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens, on all cores."""
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def cut_tokens_in(self, text: str) -> tuple[str, ...]:
        """Return the special tokens in a text before which any text may be cut.

        Cut there, the pieces' ids put together equal the ids of the whole.
        """
        added = list(self._tokenizer.get_added_tokens_decoder().values())
        return tuple(
            token.content
            for token in added
            if token.special
            and token.content in text
            and _is_found_everywhere(token, added)
            and all(self._is_exact_cut(token.content, *probe) for probe in _CUT_PROBES)
        )

    def _affixes(self) -> tuple[list[int], list[int]]:
        plain = self.encode("a")
        whole = self.encode("a", add_special_tokens=True)
        for start in range(len(whole) - len(plain) + 1):
            end = start + len(plain)
            if whole[start:end] == plain:
                return whole[:start], whole[end:]
        raise TokenizerFilesError("the post-processor changes the text's own tokens")

    def _is_exact_cut(self, token: str, left: str, right: str) -> bool:
        whole, *pieces = self.encode_many(
            [left + token + right + token, left, token + right, token]
        )
        return whole == [token_id for piece in pieces for token_id in piece]


def _is_found_everywhere(token: AddedToken, added: Sequence[AddedToken]) -> bool:
    """Say whether every occurrence in a text is this token, wherever the text is cut before it.

    Not if it reaches to its left (blanks, word borders, normalisation), and not if another added
    token contains it or can end inside it: the leftmost longest match wins.
    """
    text = token.content
    if not text or token.normalized or token.single_word or token.lstrip:
        return False
    for other in added:
        if other.content == text:
            continue
        if text in other.content:
            return False
        if any(other.content.endswith(text[:size]) for size in range(1, len(text))):
            return False
        if other.single_word and (text[0].isalnum() or text[0] == "_"):
            return False  # a cut would look like the end of a word
    return True


def _default_template(value: Any) -> str | None:
    if isinstance(value, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    elif isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str | list[str]]:
    tokens: dict[str, str | list[str]] = {}
    for name in _SPECIAL_NAMES:
        text = _token_text(config.get(name))
        if text is not None:
            tokens[name] = text
    additional = config.get("additional_special_tokens")
    if isinstance(additional, list):
        texts = [_token_text(value) for value in additional]
        tokens["additional_special_tokens"] = [text for text in texts if text is not None]
    return tokens


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
