"""Request -> prompt: rendered, tokenized and hashed, and nothing of it twice.

The rendered text is cut before special tokens that the template itself prints. The pieces' tokens,
put together, equal the tokens of the whole, since a tokenizer splits there first; what user text
says is irrelevant, even if it spells such a token. A known prompt then costs its rendering, one
pass over its bytes and a few look-ups.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128_digest

from prefix_index.anchors import Anchors
from prefix_index.blocks import root_hash
from prefix_index.chat import TemplateRefusedError
from prefix_index.cuts import choose_cuts
from prefix_index.draft import Draft, Prompt
from prefix_index.engines import (
    EngineKind,
    RenderOptions,
    build_renderer,
    fingerprint,
    given_token_ids,
    render,
)
from prefix_index.memo import MAX_MEMO_BYTES, Segment, SegmentMemo
from prefix_index.scan import segment_bounds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prefix_index.blocks import BlockHash
    from prefix_index.chat import ChatTemplate
    from prefix_index.tokens import PromptTokenizer

__all__ = ["Draft", "Prompt", "PromptReader"]

# One part in so many of the memory is for the blocks of long texts, whatever message they are in.
ANCHOR_SHARE = 8


class PromptReader:
    """Reads the prompts of one pool. Its methods may be called from any thread.

    Args:
        tokenizer: The pool's tokenizer.
        template: Its chat template; without one every chat request is refused.
        model: Identity that goes into the root of every chain.
        block_size: Tokens per block of the pool's workers.
        max_memo_bytes: Bound on the memory of known text.
        engine: Kind of the pool's workers, who render as their kind does.
        options: What the operator has set on them.

    Attributes:
        engine: As given.
        fingerprint: Hex identity of all that turns a body into tokens.
        is_timeless: Whether a body always becomes the same tokens; not with a template that prints
            the date.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        template: ChatTemplate | None,
        *,
        model: str,
        block_size: int,
        max_memo_bytes: int = MAX_MEMO_BYTES,
        engine: EngineKind = "runner",
        options: RenderOptions | None = None,
    ) -> None:
        options = options or RenderOptions()
        self.block_size = block_size
        self.engine = engine
        self.fingerprint = fingerprint(engine, tokenizer.fingerprint, template, options)
        self.is_timeless = template is None or not template.prints_date
        self._tokenizer = tokenizer
        self._renderer = build_renderer(engine, template, options) if template else None
        self._model = model
        self.anchors = Anchors(max_memo_bytes // ANCHOR_SHARE)
        self._memo = SegmentMemo(max_memo_bytes - max_memo_bytes // ANCHOR_SHARE)
        cuts = choose_cuts(tokenizer, template) if template else ()
        self._cuts = [token.encode() for token in cuts]

    @property
    def memo_bytes(self) -> int:
        """Memory of known text, in bytes."""
        return self._memo.num_bytes + self.anchors.num_bytes

    @property
    def has_forgotten(self) -> bool:
        """Whether text that was once read may be unknown again."""
        return self._memo.has_forgotten

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
        ids = given_token_ids(self.engine, body)
        if ids is not None:
            return self._ids_draft(ids, root)
        text = self.render(body)
        if self.engine == "vllm" and body.get("add_special_tokens") is True:
            return self._wrapped_draft(text, root, salt)
        return self._draft(text, Segment.start(root), root, root, salt)

    def render(self, body: Mapping[str, Any]) -> str:
        """Return the prompt text of a chat request, as the pool's engine renders it.

        Args:
            body: ``POST /v1/chat/completions`` as parsed; not changed.

        Raises:
            TemplateRefusedError: If it cannot be known here.
        """
        return render(self._renderer, body)

    def completion(
        self,
        prompt: str | list[int] | list[str] | list[list[int]],
        *,
        adapter: str = "",
        salt: str = "",
        add_special_tokens: bool = True,
    ) -> Draft:
        """Read the prompt of ``POST /v1/completions``: text, or token ids; of several the first.

        Args:
            prompt: As in the body.
            adapter: LoRA adapter the request runs on.
            salt: Isolation key the engine will be given.
            add_special_tokens: Whether a text gets what the tokenizer puts around it (BOS).

        Raises:
            TemplateRefusedError: If it is none of these.
        """
        root = root_hash(self._model, adapter=adapter, salt=salt)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if not isinstance(prompt, str):
            return self._ids_draft(prompt, root)
        if add_special_tokens:
            return self._wrapped_draft(prompt, root, salt)
        return self._draft(prompt, Segment.start(root), root, root, salt)

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

    def _ids_draft(self, ids: Any, root: BlockHash) -> Draft:
        try:
            tokens: array[int] = array("I", ids)  # what is no id raises
        except (TypeError, OverflowError, ValueError) as error:
            raise TemplateRefusedError(f"prompt is neither text nor token ids: {error}") from error
        return Draft(self, root, [Segment.start(root).extended(tokens, self.block_size)])

    def _wrapped_draft(self, text: str, root: BlockHash, salt: str) -> Draft:
        """Read text between what the tokenizer puts around it."""
        start = Segment.start(root)
        if self._tokenizer.prefix_ids:
            start = start.extended(array("I", self._tokenizer.prefix_ids), self.block_size)
        # Another first key: the same text has other tokens behind a BOS.
        suffix = array("I", self._tokenizer.suffix_ids)
        return self._draft(text, start, root, xxh3_128_digest(root + b"completion"), salt, suffix)

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
        bounds = segment_bounds(data, self._cuts)
        begin = 0
        chain_keys = []
        for end in bounds[1:]:
            key = xxh3_128_digest(key + data[begin:end])
            chain_keys.append(key)
            begin = end
        known = self._memo.known_chain(chain_keys)
        done = len(known)
        unknown = [data[begin:end] for begin, end in pairwise(bounds[done:])]
        # Tenants must not learn from response times which text another one has sent.
        seed = _seed(salt)
        return Draft(
            self,
            root,
            [start, *known],
            [text.decode() for text in unknown],
            chain_keys[done:],
            [xxh3_128_digest(text, seed) for text in unknown],
            suffix,
            data,
        )


# One entry per tenant in use.
@lru_cache(maxsize=4096)
def _seed(salt: str) -> int:
    if not salt:
        return 0
    return int.from_bytes(blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest())
