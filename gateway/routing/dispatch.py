"""The one door between the data plane and routing; it knows nothing of HTTP.

``plan`` reads a request's prompt, ``choose`` compares the workers as they are at that moment,
``admit`` charges the chosen one. Between ``choose`` and ``admit`` nothing may be awaited, or two
requests would see the same idle worker.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from gateway.routing.affinity import affinity_key, text_of
from gateway.routing.candidates import route_input
from gateway.routing.choose import Decision, choose
from gateway.routing.explain import explain_json
from gateway.routing.ticket import Outcome, Ticket, Usage
from prefix_index.blocks import usable_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gateway.routing.affinity import AffinityKey
    from gateway.routing.pool import Pool
    from prefix_index.blocks import BlockHash
    from prefix_index.prompts import Prompt, PromptReader

__all__ = [
    "Decision",
    "Dispatcher",
    "Inbound",
    "Outcome",
    "Plan",
    "Ticket",
    "Usage",
    "explain_json",
]

# Above this much unknown text, tokenizing (about 1 us per 4 characters, with the GIL held for the
# whole of it) would make other requests wait; below it, a thread costs more than it saves.
MAX_INLINE_CHARS = 2000
# English text and code in common vocabularies; used for prompts that cannot be read.
CHARS_PER_TOKEN = 4


@dataclass(slots=True)
class Inbound:
    """A client's request, as far as routing reads it.

    Attributes:
        surface: Which API it came by.
        body: Parsed body, as it will be forwarded.
        headers: Header names in lower case -> values.
        model: Model name the client asked for.
        tenant: Tenant name; empty when there are none.
        request_id: For logs and explain.
    """

    surface: Literal["chat", "completions"]
    body: dict[str, Any]
    headers: Mapping[str, str]
    model: str
    tenant: str = ""
    request_id: str = ""


@dataclass(slots=True)
class Plan:
    """What is known about a request before a worker is chosen.

    Attributes:
        pool: Where it may go.
        inbound: The request.
        num_tokens: Prompt tokens, exact if ``prompt`` is there, else estimated.
        prompt: The prompt as the engine will see it; None when it could not be read.
        hashes: Block hashes of the part that can be a hit; None without a prompt.
        unread: Why the prompt could not be read; empty when it was.
        attempts: How often it was admitted to a worker.
    """

    pool: Pool
    inbound: Inbound
    num_tokens: int
    prompt: Prompt | None = None
    hashes: Sequence[BlockHash] | None = None
    unread: str = ""
    attempts: int = 0
    _key: AffinityKey | None = field(default=None, repr=False)

    @property
    def tokens(self) -> Literal["exact", "estimated"]:
        """Whether ``num_tokens`` is the engine's count."""
        return "estimated" if self.prompt is None else "exact"

    @property
    def key(self) -> AffinityKey:
        """The request's affinity key; found when first asked for, since warm prompts need none."""
        if self._key is None:
            inbound = self.inbound
            self._key = affinity_key(
                inbound.body,
                inbound.headers,
                tenant=inbound.tenant,
                kinds=self.pool.affinity_keys,
            )
        return self._key

    @property
    def home(self) -> list[str]:
        """The key's home workers."""
        return self.pool.ring.home(self.key.ring_key, self.pool.set_size)


class Dispatcher:
    """Routes requests to the workers of its pools; one event loop only.

    Args:
        pools: The pools; their model names and aliases must differ.
        clock: Monotonic seconds.
        seed: Start of the tie rotation; None = 0.
        on_finish: Told of every attempt once it is over and learned from, with its plan; called
            on the request's path, so it must be quick and must not raise.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        *,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        on_finish: Callable[[Plan, Ticket], None] | None = None,
    ) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self._by_model = {m: pool for pool in pools for m in (*pool.models, *pool.aliases)}
        self._clock = clock
        self._on_finish = on_finish
        # Gateways that start together should not all begin with the same worker.
        self._rotation = Random(seed).randrange(1 << 16)

    def pool_for(self, model: str) -> Pool | None:
        """Return the pool that serves a model name or alias."""
        return self._by_model.get(model)

    async def plan(self, pool: Pool, inbound: Inbound) -> Plan:
        """Read a request's prompt; never fails because of the prompt.

        Mutates nothing but the reader's memory of known text and the count of unread prompts.
        """
        if pool.reader is None:
            return Plan(pool, inbound, _estimate_tokens(inbound.body), unread="no_tokenizer")
        try:
            prompt = await _read(pool.reader, inbound)
        except Exception as error:  # templates and tokenizers raise what they like
            # Never the request's end: counted, told in the plan, and routed by its text.
            reason = type(error).__name__
            pool.unread_prompts[reason] += 1
            return Plan(pool, inbound, _estimate_tokens(inbound.body), unread=reason)
        usable = usable_blocks(prompt.num_tokens, prompt.block_size)
        hashes = prompt.block_hashes
        return Plan(
            pool,
            inbound,
            prompt.num_tokens,
            prompt,
            hashes if len(hashes) <= usable else hashes[:usable],
        )

    def choose(self, plan: Plan, exclude: Collection[str] = ()) -> Decision:
        """Choose a worker as things stand; ``Decision.worker`` is None when nobody is eligible.

        Args:
            plan: The request.
            exclude: Workers where an attempt of this request failed.
        """
        request = route_input(
            plan.pool,
            now_s=self._clock(),
            prompt_tokens=plan.num_tokens,
            hashes=plan.hashes,
            ring_key=lambda: plan.key.ring_key,
            exclude=exclude,
        )
        self._rotation += 1
        return choose(request, rotation=self._rotation)

    def admit(self, plan: Plan, decision: Decision) -> Ticket:
        """Charge the chosen worker; call it before anything is awaited after ``choose``.

        Raises:
            LookupError: If the decision has no worker.
        """
        if decision.worker is None:
            raise LookupError("nobody was chosen: there is no eligible worker")
        plan.attempts += 1
        return Ticket(
            plan,
            plan.pool.workers[decision.worker],
            decision,
            self._clock,
            self._on_finish,
        )


async def _read(reader: PromptReader, inbound: Inbound) -> Prompt:
    body = inbound.body
    # What is hashed is what is forwarded: the engine separates prompts by this salt.
    salt = body.get("cache_salt")
    salt = salt if isinstance(salt, str) else ""
    if inbound.surface == "chat":
        draft = reader.chat(body, salt=salt)
    else:
        prompt = body.get("prompt")
        if not isinstance(prompt, str | list):
            raise TypeError(f"prompt: expected text or token ids, got {type(prompt).__name__}")
        draft = reader.completion(prompt, salt=salt)
    if draft.unknown_chars <= MAX_INLINE_CHARS:
        return draft.complete()
    return await asyncio.get_running_loop().run_in_executor(None, draft.complete)


def _estimate_tokens(body: Mapping[str, Any]) -> int:
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
