"""Read prompts: at once where that is cheap, behind the request where it is safe.

Text that no worker has seen cannot be cached anywhere, so a request with such text does not wait
for its tokens: it is routed by its known beginning and an estimate of the rest, and tokenized in a
thread meanwhile. Unknown to this process is not always unseen, though: workers that were warm
before it started, or traffic that passes it by, may make a worker hold what it never read. Then
the request waits for its tokens, for a moment.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from gateway.routing.affinity import text_of
from gateway.routing.cost import prefill_s
from gateway.routing.plan import Plan
from prefix_index.blocks import usable_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.routing.plan import Inbound
    from gateway.routing.pool import Pool
    from prefix_index.draft import Draft, Prompt
    from prefix_index.prompts import PromptReader

# Up to this much unknown text is tokenized on the event loop (about 1 us per 4 characters, with the
# GIL held for part of it); a thread would cost more than it saves.
MAX_INLINE_CHARS = 2000
# English text and code in common vocabularies; used for prompts that cannot be read.
CHARS_PER_TOKEN = 4
# A request waits for its tokens no longer than this, and no longer than this share of its prefill.
MAX_PATIENCE_S = 0.020
PATIENCE_SHARE = 0.10
# Text waiting to be tokenized behind its requests, about 2 s of one core: beyond it, prompts are
# routed by their known beginning and their tokens are never learned.
MAX_BACKLOG_CHARS = 8_000_000
# Threads that tokenize: the event loop keeps a core.
MAX_THREADS = 4
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
        threads = max(1, min(MAX_THREADS, (os.cpu_count() or 2) - 1))
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokens")
        self.backlog_chars = 0

    async def read(self, pool: Pool, inbound: Inbound, *, in_full: bool) -> Plan:
        """Read a prompt; never fails because of the prompt.

        Args:
            pool: Where the request may go.
            inbound: The request.
            in_full: Wait for all tokens, however long that takes.
        """
        reader = pool.reader
        if reader is None:
            return Plan(pool, inbound, estimate_tokens(inbound.body), unread="no_tokenizer")
        try:
            draft = _draft(reader, inbound)
            unknown_chars = draft.unknown_chars
            plan = Plan(pool, inbound, 0)
            if unknown_chars <= MAX_INLINE_CHARS:
                plan.take(draft.complete())
            else:
                await self._read_long(plan, draft, unknown_chars, in_full)
        except Exception as error:  # templates and tokenizers raise what they like
            # Never the request's end: counted, told in the plan, and routed by its text.
            reason = type(error).__name__
            pool.unread_prompts[reason] += 1
            return Plan(pool, inbound, estimate_tokens(inbound.body), unread=reason)
        return plan

    async def _read_long(self, plan: Plan, draft: Draft, unknown_chars: int, in_full: bool) -> None:
        pool, begins = plan.pool, draft.beginning()
        new_tokens = max(1, round(begins.rest_chars / pool.chars_per_token))
        plan.num_tokens = begins.num_tokens + new_tokens
        plan.hashes = begins.hashes[: usable_blocks(plan.num_tokens, pool.block_size)]
        plan.text_chain = begins.chain
        if self.backlog_chars > MAX_BACKLOG_CHARS and not in_full:
            pool.unread_prompts["Backlog"] += 1
            return
        self.backlog_chars += unknown_chars
        loop = asyncio.get_running_loop()
        tokens = loop.run_in_executor(self._executor, draft.complete)
        tokens.add_done_callback(partial(self._arrived, unknown_chars))
        if in_full:
            plan.take(await tokens)
            return
        if 2 * begins.num_tokens < plan.num_tokens and pool.may_hold_unread_text(self._clock()):
            await asyncio.wait((tokens,), timeout=_patience_s(pool, new_tokens, plan.num_tokens))
        if tokens.done():
            plan.take(tokens.result())
            return
        plan.is_behind = True
        tokens.add_done_callback(partial(_settle, plan, draft.known_tokens, unknown_chars))

    def _arrived(self, unknown_chars: int, _tokens: asyncio.Future[Prompt]) -> None:
        self.backlog_chars -= unknown_chars


def _settle(
    plan: Plan, known_tokens: int, unknown_chars: int, tokens: asyncio.Future[Prompt]
) -> None:
    pool = plan.pool
    error = None if tokens.cancelled() else tokens.exception()
    if tokens.cancelled() or error is not None:
        reason = type(error).__name__ if error is not None else "Cancelled"
        pool.unread_prompts[reason] += 1
        plan.settle(None, reason)
        return
    prompt = tokens.result()
    new_tokens = max(1, prompt.num_tokens - known_tokens)
    pool.chars_per_token += RATIO_ALPHA * (unknown_chars / new_tokens - pool.chars_per_token)
    plan.settle(prompt)


def _draft(reader: PromptReader, inbound: Inbound) -> Draft:
    body = inbound.body
    # What is hashed is what is forwarded: the engine separates prompts by this salt.
    salt = body.get("cache_salt")
    salt = salt if isinstance(salt, str) else ""
    if inbound.surface == "chat":
        return reader.chat(body, salt=salt)
    prompt = body.get("prompt")
    if not isinstance(prompt, str | list):
        raise TypeError(f"prompt: expected text or token ids, got {type(prompt).__name__}")
    return reader.completion(prompt, salt=salt)


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
