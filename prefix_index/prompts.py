"""Request -> prompt: rendered, tokenized and hashed, and nothing of it twice.

The rendered text is cut before special tokens that the template itself prints. The pieces' tokens,
put together, equal the tokens of the whole, since a tokenizer splits there first; what user text
says is irrelevant, even if it spells such a token. A known prompt then costs its rendering, one
pass over its bytes and a few look-ups.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128_digest

from prefix_index.blocks import BlockHash, hash_blocks, root_hash
from prefix_index.chat import TemplateRefusedError
from prefix_index.cuts import choose_cuts
from prefix_index.memo import Segment, SegmentMemo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prefix_index.chat import ChatTemplate
    from prefix_index.tokens import PromptTokenizer

# 8M tokens at about 9 bytes each (id, share of a block hash): 72 MB when full.
_MAX_MEMO_TOKENS = 8_000_000


@dataclass(slots=True)
class Prompt:
    """What an engine computes for a request, in tokens and in blocks.

    Attributes:
        num_tokens: Prompt tokens.
        block_hashes: One per full block, in order.
        block_size: Tokens per block.
        root: Parent of the first block.
        pieces: Tokens of each rendered segment.
    """

    num_tokens: int
    block_hashes: list[BlockHash]
    block_size: int
    root: BlockHash
    pieces: list[array[int]]

    @classmethod
    def from_ids(cls, token_ids: Sequence[int], block_size: int, root: BlockHash) -> Prompt:
        """Return the prompt that has these tokens."""
        ids = array("I", token_ids)
        return cls(len(ids), hash_blocks(ids, block_size, root), block_size, root, [ids])

    @property
    def token_ids(self) -> array[int]:
        """All tokens, put together anew on each call: O(num_tokens)."""
        ids: array[int] = array("I")
        for piece in self.pieces:
            ids += piece
        return ids

    @property
    def segment_ends(self) -> list[int]:
        """Token offset after each rendered segment (usually one per message)."""
        ends = []
        end = 0
        for piece in self.pieces:
            end += len(piece)
            ends.append(end)
        return ends


class Draft:
    """A prompt of which the known beginning is at hand and the rest is still text."""

    __slots__ = ("_chain_keys", "_known", "_reader", "_root", "_suffix", "_text_keys", "_texts")

    def __init__(
        self,
        reader: PromptReader,
        root: BlockHash,
        known: list[Segment],
        texts: Sequence[str] = (),
        chain_keys: Sequence[bytes] = (),
        text_keys: Sequence[bytes] = (),
        suffix: array[int] | None = None,
    ) -> None:
        self._reader = reader
        self._root = root
        self._known = known
        # Of the segments behind the known ones.
        self._texts = texts
        self._chain_keys = chain_keys
        self._text_keys = text_keys
        self._suffix = suffix

    @property
    def known_tokens(self) -> int:
        """Tokens of the known beginning."""
        return self._known[-1].num_tokens

    @property
    def unknown_chars(self) -> int:
        """Characters that ``complete`` has to tokenize."""
        return sum(map(len, self._texts))

    def complete(self) -> Prompt:
        """Tokenize and hash what is unknown. May run in any thread; releases the GIL meanwhile."""
        segments = self._known
        if self._texts:
            segments = segments + self._reader.learn(
                segments[-1], self._texts, self._chain_keys, self._text_keys
            )
        if self._suffix:
            segments = [*segments, segments[-1].extended(self._suffix, self._reader.block_size)]
        hashes: list[BlockHash] = []
        for segment in segments:
            hashes += segment.block_hashes
        return Prompt(
            num_tokens=segments[-1].num_tokens,
            block_hashes=hashes,
            block_size=self._reader.block_size,
            root=self._root,
            pieces=[segment.ids for segment in segments if segment.ids],
        )


class PromptReader:
    """Reads the prompts of one pool. Its methods may be called from any thread.

    Args:
        tokenizer: The pool's tokenizer.
        template: Its chat template; without one every chat request is refused.
        model: Identity that goes into the root of every chain.
        block_size: Tokens per block of the pool's workers.
        max_memo_tokens: Bound on the tokens of known segments.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        template: ChatTemplate | None,
        *,
        model: str,
        block_size: int,
        max_memo_tokens: int = _MAX_MEMO_TOKENS,
    ) -> None:
        self.block_size = block_size
        self._tokenizer = tokenizer
        self._template = template
        self._model = model
        self._memo = SegmentMemo(max_memo_tokens)
        cuts = choose_cuts(tokenizer, template) if template else ()
        self._cuts = [token.encode() for token in cuts]

    def chat(self, body: Mapping[str, Any], *, adapter: str = "", salt: str = "") -> Draft:
        """Render a chat request and find its known beginning.

        Args:
            body: ``POST /v1/chat/completions`` as parsed; not changed.
            adapter: LoRA adapter the request runs on.
            salt: Isolation key the engine will be given.

        Raises:
            TemplateRefusedError: If the prompt text cannot be known here.
        """
        root = root_hash(self._model, adapter=adapter, salt=salt)
        return self._draft(self._render(body), Segment.start(root), root, root, salt)

    def completion(
        self,
        prompt: str | list[int] | list[str] | list[list[int]],
        *,
        adapter: str = "",
        salt: str = "",
    ) -> Draft:
        """Read the prompt of ``POST /v1/completions``: text, or token ids; of several the first.

        Raises:
            TemplateRefusedError: If it is none of these.
        """
        root = root_hash(self._model, adapter=adapter, salt=salt)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            start = Segment.start(root)
            if self._tokenizer.prefix_ids:
                start = start.extended(array("I", self._tokenizer.prefix_ids), self.block_size)
            # Another first key: the same text has other tokens behind a BOS.
            suffix = array("I", self._tokenizer.suffix_ids)
            return self._draft(prompt, start, root, root + b"completion", salt, suffix)
        try:
            ids: array[int] = array("I", prompt)  # type: ignore[arg-type]  # what is no id raises
        except (TypeError, OverflowError) as error:
            raise TemplateRefusedError(f"prompt is neither text nor token ids: {error}") from error
        return Draft(self, root, [Segment.start(root).extended(ids, self.block_size)])

    def learn(
        self,
        before: Segment,
        texts: Sequence[str],
        chain_keys: Sequence[bytes],
        text_keys: Sequence[bytes],
    ) -> list[Segment]:
        """Tokenize and remember the segments that follow ``before``; used by ``Draft``."""
        tokens = self._memo.known_texts(text_keys)
        new_texts = [text for text, ids in zip(texts, tokens, strict=True) if ids is None]
        new_tokens = iter(self._tokenizer.encode_many(new_texts) if new_texts else ())
        segments = []
        for known in tokens:
            ids = array("I", next(new_tokens)) if known is None else known
            before = before.extended(ids, self.block_size)
            segments.append(before)
        self._memo.add(chain_keys, segments, text_keys)
        return segments

    def _render(self, body: Mapping[str, Any]) -> str:
        if self._template is None:
            raise TemplateRefusedError("the model has no chat template")
        if body.get("chat_template"):
            raise TemplateRefusedError("the request brings its own chat template")
        kwargs = body.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, dict):
            raise TemplateRefusedError("chat_template_kwargs must be an object")
        if body.get("reasoning_effort") is not None:
            kwargs = {"reasoning_effort": body["reasoning_effort"], **kwargs}
        messages: Any = body.get("messages")  # checked by the template
        return self._template.render(
            messages,
            tools=body.get("tools"),
            add_generation_prompt=bool(body.get("add_generation_prompt", True)),
            continue_final_message=bool(body.get("continue_final_message", False)),
            documents=body.get("documents"),
            kwargs=kwargs,
        )

    def _draft(
        self,
        text: str,
        start: Segment,
        root: BlockHash,
        key: bytes,
        salt: str,
        suffix: array[int] | None = None,
    ) -> Draft:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise TemplateRefusedError(f"the prompt is not valid Unicode: {error}") from error
        bounds = self._bounds(data)
        view = memoryview(data)
        # Tenants must not learn from response times which text another one has sent.
        seed = _seed(salt)
        text_keys = []
        chain_keys = []
        for begin, end in pairwise(bounds):
            text_key = xxh3_128_digest(view[begin:end], seed)
            key = xxh3_128_digest(key + text_key)
            text_keys.append(text_key)
            chain_keys.append(key)
        known = self._memo.known_chain(chain_keys)
        done = len(known)
        return Draft(
            self,
            root,
            [start, *known],
            [data[begin:end].decode() for begin, end in pairwise(bounds[done:])],
            chain_keys[done:],
            text_keys[done:],
            suffix,
        )

    def _bounds(self, data: bytes) -> list[int]:
        """Return the offsets of all segments, the end of the last one included."""
        bounds = [0]
        for token in self._cuts:
            at = data.find(token, 1)
            while at > 0:
                bounds.append(at)
                at = data.find(token, at + len(token))
        if len(self._cuts) > 1:
            bounds.sort()
        bounds.append(len(data))
        return bounds


# One entry per tenant in use.
@lru_cache(maxsize=4096)
def _seed(salt: str) -> int:
    if not salt:
        return 0
    return int.from_bytes(blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest())
