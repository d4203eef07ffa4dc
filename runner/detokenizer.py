"""From generated token ids back to text, piece by piece.

A piece is given out only when later tokens cannot change it: bytes of an unfinished character and
text that may turn into a stop string are held back. All pieces of a sample together are exactly
the decoded text of its tokens, cut before the first stop string.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import decoders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

# What decoding puts in place of bytes that are no complete UTF-8 character (yet).
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of one sample while its tokens arrive.

    Attributes:
        stopped_by: The stop string that ended the text, None so far. Nothing may be pushed
            afterwards.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # Decoding a token may need the one before it (word boundaries), so the window starts one
        # piece back: [_context, _given) is decoded again and dropped from the result.
        self._context = 0
        self._given = 0
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that became final, often ``""``."""
        self._ids.append(token_id)
        return self._release(self._decode(is_last=False), is_last=False)

    def finish(self) -> str:
        """Return what was still held back; the sample has no more tokens."""
        if self.stopped_by is not None:
            return ""
        return self._release(self._decode(is_last=True), is_last=True)

    def _decode(self, *, is_last: bool) -> str:
        known = self._tokenizer.decode(self._ids[self._context : self._given])
        text = self._tokenizer.decode(self._ids[self._context :])
        if text.endswith(REPLACEMENT) and not is_last:
            return ""
        self._context, self._given = self._given, len(self._ids)
        return text[len(known) :]

    def _release(self, text: str, *, is_last: bool) -> str:
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            # The earliest match; equal starts cut the same text, so their order is free.
            cut, self.stopped_by = min(found)
            self._held = ""
            return text[:cut]
        keep = 0 if is_last else max((_overlap(text, stop) for stop in self._stop), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class TokenTexts:
    """The text and the exact bytes of single tokens, as log probabilities show them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._byte_of = _byte_level_alphabet() if is_byte_level else {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes; they need not be whole UTF-8 characters."""
        written = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(self._byte_of[letter] for letter in written)
        except KeyError:
            # No byte-level vocabulary, or a special token, which is written as it is.
            return self.text_of(token_id).encode()

    def text_of(self, token_id: int) -> str:
        """Return the token decoded alone; special tokens by their name."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def key_of(self, token_id: int) -> str:
        r"""Return a text that distinct tokens do not share: ``bytes:\xe2\x82`` for byte parts.

        Source: OpenAI completions API, the form of such tokens in ``logprobs.tokens``.
        """
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _byte_level_alphabet() -> dict[str, int]:
    """Return the letter -> byte table of byte-level BPE.

    Source: GPT-2 ``bytes_to_unicode``: printable bytes stand for themselves, the others for
    letters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }
