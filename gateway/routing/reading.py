"""Read prompts: at once where that is cheap, behind the request where it is safe.

Text that no worker has seen cannot be cached anywhere, so a request with such text does not wait
for its tokens: it is routed by its known beginning and an estimate of the rest, and tokenized in a
thread meanwhile. Unknown to this process is not always unseen, though: workers that were warm
before it started, or traffic that passes it by, may make a worker hold what it never read. Then
the request waits for its tokens, for a moment.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from gateway.routing.affinity import text_of
from gateway.routing.behind import Job, TokenThreads
from gateway.routing.cost import prefill_s
from gateway.routing.plan import Plan
from prefix_index.blocks import usable_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.routing.plan import Inbound
    from gateway.routing.pool import Pool
    from prefix_index.draft import Draft, Prompt
    from prefix_index.prompts import PromptReader

# Up to this much unknown text is tokenized on the event loop (about 0.4 us a character) where its
# tokens matter: nothing else is known of the prompt.
MAX_INLINE_CHARS = 2000
# Where at least half of a prompt is known, its end is tokenized on the loop only if that costs no
# more than handing it to a thread.
MAX_TAIL_CHARS = 200
# English text and code in common vocabularies; used for prompts that cannot be read.
CHARS_PER_TOKEN = 4
# A request waits for its tokens no longer than this, and no longer than this share of its prefill.
MAX_PATIENCE_S = 0.020
PATIENCE_SHARE = 0.10
# Text waiting to be tokenized behind its requests, about 2 s of one core: beyond it, prompts are
# routed by their known beginning and their tokens are never learned.
MAX_BACKLOG_CHARS = 8_000_000
# Weight of one prompt in the pool's mean of characters per token.
RATIO_ALPHA = 0.05


class Reading:
    """Reads the prompts of all pools; one event loop only.

    Args:
        clock: Monotonic seconds, the tickets'.

    Attributes:
        backlog_chars: Text that is being tokenized in threads or waits for it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._threads = TokenThreads()
        self.backlog_chars = 0
        # Requests whose prompt is being tokenized, by what tokenizes it and its last key.
        self._behind: dict[tuple[PromptReader, bytes], list[Plan]] = {}

    def read_known(self, pool: Pool, inbound: Inbound) -> Plan | None:
        """Return the plan of a body whose prompt was read before; None if it was not."""
        known, reader = inbound.known, pool.reader
        if known is None or reader is None:
            return None
        adapter = pool.adapter_of(inbound.model)
        prompt = known.prompt(reader, adapter, _salt(inbound))
        if prompt is None:
            return None
        plan = Plan(pool, inbound, 0, adapter=adapter)
        plan.take(prompt)
        return plan

    async def read(self, pool: Pool, inbound: Inbound, *, in_full: bool) -> Plan:
        """Read a prompt; never fails because of the prompt.

        Args:
            pool: Where the request may go.
            inbound: The request.
            in_full: Wait for all tokens, however long that takes.
        """
        reader = pool.reader
        plan = Plan(pool, inbound, 0, adapter=pool.adapter_of(inbound.model))
        if inbound.surface == "none":
            plan.num_tokens, plan.hashes, plan.unread = 1, (), "no_prompt"
            return plan
        if inbound.surface == "text":
            return _unread(plan, "not_readable")
        if reader is None:
            return _unread(plan, "no_tokenizer")
        try:
            draft = _draft(reader, inbound, plan.adapter)
            unknown_chars = draft.unknown_chars
            known_chars = draft.known_tokens * pool.chars_per_token
            limit = MAX_TAIL_CHARS if known_chars >= unknown_chars else MAX_INLINE_CHARS
            if unknown_chars <= limit:
                _take(plan, reader, draft.complete())
            else:
                await self._read_behind(plan, reader, draft, unknown_chars, in_full)
        except Exception as error:  # templates and tokenizers raise what they like
            # Never the request's end: counted, told in the plan, and routed by its text.
            reason = type(error).__name__
            pool.unread_prompts[reason] += 1
            return _unread(plan, reason)
        return plan

    async def _read_behind(
        self,
        plan: Plan,
        reader: PromptReader,
        draft: Draft,
        unknown_chars: int,
        in_full: bool,
    ) -> None:
        pool = plan.pool
        begins = draft.beginning(by_text=unknown_chars > MAX_INLINE_CHARS)
        new_tokens = max(1, round(begins.rest_chars / pool.chars_per_token))
        plan.num_tokens = begins.num_tokens + new_tokens
        plan.hashes = begins.hashes[: usable_blocks(plan.num_tokens, pool.block_size)]
        plan.text_chain = begins.chain
        key = (reader, draft.key)
        siblings = self._behind.get(key)
        if siblings is not None:
            # The same prompt is on its way already: to tokenize it once is enough for all.
            siblings.append(plan)
        elif self.backlog_chars > MAX_BACKLOG_CHARS and not in_full:
            pool.unread_prompts["Backlog"] += 1
            return
        else:
            self._behind[key] = [plan]
            self.backlog_chars += unknown_chars
            tell = partial(self._arrived, key, draft.known_tokens, unknown_chars)
            self._threads.start(Job(draft, asyncio.get_running_loop(), tell))
        plan.is_behind = True
        if in_full:
            await _settled(plan)
        elif 2 * begins.num_tokens < plan.num_tokens and pool.may_hold_unread_text(self._clock()):
            patience_s = _patience_s(pool, new_tokens, plan.num_tokens)
            with suppress(TimeoutError):
                await asyncio.wait_for(_settled(plan), patience_s)

    def _arrived(
        self,
        key: tuple[PromptReader, bytes],
        known_tokens: int,
        unknown_chars: int,
        prompt: Prompt | None,
        error: Exception | None,
    ) -> None:
        """Give a prompt's tokens to all requests that have it."""
        self.backlog_chars -= unknown_chars
        plans, reader = self._behind.pop(key), key[0]
        pool = plans[0].pool
        if prompt is None:
            reason = type(error).__name__
            for plan in plans:
                pool.unread_prompts[reason] += 1
                plan.settle(None, reason)
            return
        new_tokens = max(1, prompt.num_tokens - known_tokens)
        pool.chars_per_token += RATIO_ALPHA * (unknown_chars / new_tokens - pool.chars_per_token)
        for plan in plans:
            _remember(plan, reader, prompt)
            plan.settle(prompt)


async def _settled(plan: Plan) -> None:
    """Return once the plan's tokens are there, or will never be."""
    settled = asyncio.Event()
    plan.when_settled(settled.set)
    await settled.wait()


def _unread(plan: Plan, reason: str) -> Plan:
    """Return the plan of a prompt that cannot be read."""
    inbound = plan.inbound
    tokens = estimate_tokens(inbound.body)
    return Plan(plan.pool, inbound, tokens, unread=reason, adapter=plan.adapter)


def _take(plan: Plan, reader: PromptReader, prompt: Prompt) -> None:
    _remember(plan, reader, prompt)
    plan.take(prompt)


def _remember(plan: Plan, reader: PromptReader, prompt: Prompt) -> None:
    known = plan.inbound.known
    if known is not None:
        known.remember(reader, plan.adapter, _salt(plan.inbound), prompt)


def _salt(inbound: Inbound) -> str:
    """Return what keeps a prompt's blocks apart from equal ones.

    What is hashed is what is forwarded: the engine separates prompts by this salt.
    """
    return inbound.cache_salt


def _draft(reader: PromptReader, inbound: Inbound, adapter: str) -> Draft:
    body, salt = inbound.body, _salt(inbound)
    if inbound.surface == "chat":
        return reader.chat(body, adapter=adapter, salt=salt)
    prompt = body.get("prompt")
    if not isinstance(prompt, str | list):
        raise TypeError(f"prompt: expected text or token ids, got {type(prompt).__name__}")
    return reader.completion(prompt, adapter=adapter, salt=salt)


def _patience_s(pool: Pool, new_tokens: int, prompt_tokens: int) -> float:
    """Return how long a request may wait for its tokens: its prefill on the quickest worker."""
    prefills = [
        prefill_s(model, new_tokens, prompt_tokens)
        for worker in pool.workers.values()
        if (model := worker.learner.model) is not None
    ]
    return min([MAX_PATIENCE_S, *(PATIENCE_SHARE * p for p in prefills)])


def estimate_tokens(body: Mapping[str, Any]) -> int:
    """Estimate the length of a prompt that cannot be read."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    messages = body.get("messages")
    messages = messages if isinstance(messages, list) else []
    texts = [text_of(m.get("content")) for m in messages if isinstance(m, dict)]
    if isinstance(prompt, str):
        texts.append(prompt)
    return max(1, sum(map(len, texts)) // CHARS_PER_TOKEN)
