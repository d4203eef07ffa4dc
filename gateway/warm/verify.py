"""Proof that a worker holds what it was given: a request that hits all of it, and the index."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gateway.warm.placement import held_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.warm.sending import Sender, Sent
    from gateway.warm.shareable import Shareable

# Events come within a step of the engine; a busy one, or another gateway that reads them, takes
# longer.
EVENTS_S = 3.0
LOOK_S = 0.02


class Proof:
    """What was found of one item on one worker.

    Attributes:
        sent: The probes; the first one computes what was missing, the second one then hits.
        wanted_tokens: Tokens that must be there.
        held_tokens: Those that the worker's events say are there; None if it sends none.
    """

    def __init__(self, wanted_tokens: int) -> None:
        self.sent: list[Sent] = []
        self.wanted_tokens = wanted_tokens
        self.held_tokens: int | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens that the last probe hit; None if the engine does not say."""
        return self.sent[-1].cached_tokens if self.sent else None

    @property
    def computed_tokens(self) -> int:
        """What the probes had to compute; 0 if the engine does not say."""
        return sum(sent.computed_tokens for sent in self.sent if sent.cached_tokens is not None)

    @property
    def is_proven(self) -> bool:
        """Whether the engine itself says so."""
        return self.cached_tokens is not None

    @property
    def is_warm(self) -> bool:
        """Whether all is there by everything that is known, and something is."""
        known = [tokens for tokens in (self.cached_tokens, self.held_tokens) if tokens is not None]
        return bool(known) and min(known) >= self.wanted_tokens

    @property
    def reason(self) -> str:
        """Why it is not warm, or not proven; empty if it is."""
        cached, held, wanted = self.cached_tokens, self.held_tokens, self.wanted_tokens
        if cached is not None and cached < wanted:
            return f"a probe hit {cached} of {wanted} tokens"
        if held is not None and held < wanted:
            return f"its events tell of {held} of {wanted} tokens"
        if cached is None:
            return "unproven: the engine reports no cached_tokens"
        return ""

    def event(self, item_id: str, worker_id: str) -> dict[str, Any]:
        """Return the line of it."""
        return {
            "event": "verified",
            "id": item_id,
            "worker": worker_id,
            "cached_tokens": self.cached_tokens,
            "wanted_tokens": self.wanted_tokens,
            "held_tokens": self.held_tokens,
            "computed_tokens": self.computed_tokens,
            "warm": self.is_warm,
            "proven": self.is_proven,
            "reason": self.reason,
        }


async def prove(
    sender: Sender,
    found: Shareable,
    worker_id: str,
    wanted_tokens: int,
    clock: Callable[[], float],
    *,
    may_compute: bool = True,
) -> Proof:
    """Probe one item on one worker.

    Args:
        sender: Sends the probes.
        found: The item.
        worker_id: Where.
        wanted_tokens: Tokens that must be there.
        clock: Monotonic seconds.
        may_compute: Whether what a first probe had to compute counts, once a second one finds it.

    Raises:
        SendError: If the worker did not answer.
    """
    proof = Proof(wanted_tokens)
    proof.sent.append(await sender.send(found, worker_id, wanted_tokens))
    cached_tokens = proof.cached_tokens
    if may_compute and cached_tokens is not None and cached_tokens < wanted_tokens:
        proof.sent.append(await sender.send(found, worker_id, wanted_tokens))
    worker = found.pool.workers.get(worker_id)
    if worker is None or worker.mode != "exact":
        return proof  # what we model ourselves proves nothing
    until_s = clock() + EVENTS_S
    while True:
        held = held_by(found.pool, found).get(worker_id)
        proof.held_tokens = 0 if held is None else min(held.tokens, wanted_tokens)
        if proof.held_tokens >= wanted_tokens or clock() >= until_s:
            return proof
        await asyncio.sleep(LOOK_S)
