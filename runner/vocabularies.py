"""The kinds of byte-level BPE that GGUF files name: how each cuts text before it merges.

A file says only a name (``tokenizer.ggml.pre``); what it stands for is knowledge of its reader.

Source: llama.cpp, ``llama-vocab.cpp`` (smollm, qwen2, llama-bpe), and the tokenizer.json of the
models: llama.cpp writes its patterns otherwise for its own engine, and leaves out Qwen's
normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Mapping

# Words with the character before them, digits in groups, other characters, line ends, blanks.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """How one kind cuts and merges.

    Attributes:
        digits: Pattern of neighbouring digits that stay together; empty for GPT-2's own pattern
            with every digit alone.
        composes: Text is normalised to composed characters (NFC).
        ignores_merges: A piece that is a token is not built from merges.
        adds_bos: Texts begin with the BOS token unless the file says otherwise.
    """

    digits: str = ""
    composes: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def apply(self, tokenizer: Tokenizer) -> None:
        """Set up a tokenizer to cut this way."""
        if self.composes:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*self._cutters()])

    def _cutters(self) -> tuple[pre_tokenizers.PreTokenizer, pre_tokenizers.PreTokenizer]:
        if not self.digits:
            return (
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            )
        return (
            pre_tokenizers.Split(Regex(_PATTERN.replace("DIGITS", self.digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        )


VOCABULARIES: Mapping[str, Vocabulary] = {
    # transformers' GGUF conversion drops the digit step: a number after two blanks splits
    # differently there.
    "smollm": Vocabulary(),
    "qwen2": Vocabulary(digits=r"\p{N}", composes=True),
    "llama-bpe": Vocabulary(digits=r"\p{N}{1,3}", ignores_merges=True, adds_bos=True),
}
