"""Small tokenizers of every kind that matters for cutting text."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from prefix_index import PromptTokenizer


def build(*tokens: AddedToken, prepend: str | None = None, bos: bool = False) -> Tokenizer:
    """Return a character tokenizer with these added tokens."""
    vocab = {token: at for at, token in enumerate([*map(chr, range(32, 127)), "▁", "[UNK]"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="[UNK]"))  # noqa: S106  # no password
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    elif prepend:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    tokenizer.add_tokens(list(tokens))
    if bos:
        tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


def special(content: str, **options: bool) -> AddedToken:
    return AddedToken(content, special=True, normalized=False, **options)


def prompt_tokenizer(tokenizer: Tokenizer, **config: Any) -> PromptTokenizer:
    return PromptTokenizer.from_parts(tokenizer.to_str(), config)
