"""What this gateway has routed to one worker and not got back yet: the freshest load there is.

Charged before the first await of a request, released exactly once whatever happens to it. All
numbers return to zero when nothing is in flight; a property test holds the books to that.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from gateway.routing.active import ActiveBlocks, Run
from gateway.routing.cost import OUTPUT_ALLOWANCE_TOKENS, Candidate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash


class Charge:
    """One request's entry in the books; made by ``Books.charge`` only.

    Attributes:
        charged_s: When it was routed.
        due_s: When its first token is predicted; None when nothing is predicted.
        found_idle: Whether nothing was queued and at most two requests ran when it came.
    """

    __slots__ = (
        "charged_s",
        "due_s",
        "found_idle",
        "is_finished",
        "is_queued",
        "kv_tokens",
        "prefill_s",
        "prompt_tokens",
        "run",
        "uncached_tokens",
    )

    def __init__(
        self,
        charged_s: float,
        due_s: float | None,
        prompt_tokens: int,
        uncached_tokens: int,
        prefill_s: float,
        found_idle: bool,
        run: Run,
        kv_tokens: int,
    ) -> None:
        self.charged_s = charged_s
        self.due_s = due_s
        self.prompt_tokens = prompt_tokens
        self.uncached_tokens = uncached_tokens
        self.prefill_s = prefill_s
        self.found_idle = found_idle
        self.run = run
        self.kv_tokens = kv_tokens
        self.is_queued = True
        self.is_finished = False


class Books:
    """The requests in flight on one worker; one event loop only.

    The numbers that ``choose()`` reads are kept where it reads them, in one ``Candidate`` that is
    copied for each request: filling one in anew costs several times as much.

    Attributes:
        load: The worker as a candidate, up to date as far as the books go; copy it, never keep it.
            Who reads candidates writes down there what seldom changes otherwise.
        prefilled_s: Estimated prefill seconds completed since the start; only ever grows.
        out_busy_until_s: When the pulls that others make from this worker end.
        awaited: Requests whose first token is predicted and missing, in routing order.
        due_s: When the first token of the first of them is predicted; infinite without any.
    """

    def __init__(self, block_size: int = 16) -> None:
        self.load = Candidate("")
        self.prefilled_s = 0.0
        self.out_busy_until_s = 0.0
        self._block_size = block_size
        self._blocks = ActiveBlocks()
        self._kv_tail_tokens = 0
        # In routing order, so that the first one is the one the engine should serve next.
        self.awaited: dict[Charge, float] = {}
        self.due_s = inf
        self._num_queued = 0

    @property
    def in_flight(self) -> int:
        """Requests routed and not finished (``n``)."""
        return self.load.in_flight

    @property
    def queued_tokens(self) -> int:
        """Uncached tokens of those without a first token (``Qtok``)."""
        return self.load.queued_tokens

    @property
    def queued_s(self) -> float:
        """Their estimated prefill seconds (``Qsec``)."""
        return self.load.queued_s

    @property
    def context_tokens(self) -> int:
        """Prompt + allowance of all in flight (``ctx``)."""
        return self.load.context_tokens

    @property
    def progress_at_s(self) -> float:
        """Last first token, or the last routing that found no queue (``t1``)."""
        return self.load.progress_at_s

    @property
    def restore_until_s(self) -> float:
        """When the restores routed there end."""
        return self.load.restore_until_s

    @property
    def active_tokens(self) -> int:
        """KV demand of the in-flight requests: distinct full blocks + partial ones + outputs."""
        return self.load.active_tokens

    @property
    def num_decoding(self) -> int:
        """Requests past their first token."""
        return self.load.in_flight - self._num_queued

    @property
    def block_size(self) -> int:
        """Tokens per block; may be set while requests are in flight."""
        return self._block_size

    @block_size.setter
    def block_size(self, block_size: int) -> None:
        self._block_size = block_size
        self._count_active()

    def common_tokens(self, hashes: Sequence[BlockHash]) -> int:
        """Leading full-block tokens of a prompt that are active already."""
        return self._blocks.common_blocks(hashes) * self._block_size

    def overdue_s(self, now_s: float) -> float:
        """How late the first token is that was routed first of those still missing, else 0.

        An engine that is out of slots, stuck or slower than believed shows here first.
        """
        return max(0.0, now_s - self.due_s)

    def charge(
        self,
        now_s: float,
        *,
        prompt_tokens: int,
        uncached_tokens: int,
        prefill_s: float = 0.0,
        restore_s: float = 0.0,
        pull_s: float = 0.0,
        due_s: float | None = None,
        hashes: Sequence[BlockHash] = (),
    ) -> Charge:
        """Book a request. Call it before anything is awaited.

        Args:
            now_s: Routing time.
            prompt_tokens: Prompt length.
            uncached_tokens: Tokens to prefill as predicted.
            prefill_s: Their seconds as predicted; 0 while the worker's speed is unknown.
            restore_s: Seconds its restore keeps the link to the lower tiers busy.
            pull_s: Seconds its pull keeps the network link busy.
            due_s: When its first token should be seen; None if it will not be seen.
            hashes: All full blocks of the prompt; kept until ``finish``.
        """
        load = self.load
        found_idle = not self._num_queued and load.in_flight <= 2
        if not self._num_queued:
            load.progress_at_s = now_s
        if restore_s > 0.0:
            load.restore_until_s = max(load.restore_until_s, now_s) + restore_s
        if pull_s > 0.0:
            load.in_busy_until_s = max(load.in_busy_until_s, now_s) + pull_s
        tail = prompt_tokens - len(hashes) * self._block_size + OUTPUT_ALLOWANCE_TOKENS
        charge = Charge(
            now_s,
            due_s,
            prompt_tokens,
            uncached_tokens,
            prefill_s,
            found_idle,
            self._blocks.add(hashes),
            tail,
        )
        if due_s is not None:
            if not self.awaited:
                self.due_s = due_s
            self.awaited[charge] = due_s
        self._num_queued += 1
        load.in_flight += 1
        load.queued_tokens += uncached_tokens
        load.queued_s += prefill_s
        load.context_tokens += prompt_tokens + OUTPUT_ALLOWANCE_TOKENS
        self._kv_tail_tokens += tail
        self._count_active()
        return charge

    def hand_over(self, now_s: float, pull_s: float) -> None:
        """Book that another worker pulls from this one for so long."""
        self.out_busy_until_s = max(self.out_busy_until_s, now_s) + pull_s

    def correct(
        self, charge: Charge, *, prompt_tokens: int, hashes: Sequence[BlockHash] = ()
    ) -> None:
        """Replace what was estimated about a request's prompt, once its tokens are known.

        Args:
            charge: Its entry; nothing happens after ``finish``.
            prompt_tokens: Exact prompt length.
            hashes: All full blocks of the prompt.
        """
        if charge.is_finished:
            return
        load = self.load
        grown = prompt_tokens - charge.prompt_tokens
        self._blocks.release(charge.run)
        charge.run = self._blocks.add(hashes)
        tail = prompt_tokens - len(hashes) * self._block_size + OUTPUT_ALLOWANCE_TOKENS
        self._kv_tail_tokens += tail - charge.kv_tokens
        charge.kv_tokens = tail
        self._count_active()
        load.context_tokens += grown
        charge.prompt_tokens = prompt_tokens
        if charge.is_queued:
            uncached = max(1, charge.uncached_tokens + grown)
            prefill_s = charge.prefill_s * uncached / charge.uncached_tokens
            load.queued_tokens += uncached - charge.uncached_tokens
            load.queued_s += prefill_s - charge.prefill_s
            charge.uncached_tokens, charge.prefill_s = uncached, prefill_s

    def first_token(self, charge: Charge, now_s: float) -> None:
        """Move a request from queued to decoding; a second call changes nothing."""
        if not charge.is_queued:
            return
        self._leave_queue(charge)
        self.load.progress_at_s = max(self.load.progress_at_s, now_s)
        self.prefilled_s += charge.prefill_s

    def finish(self, charge: Charge) -> None:
        """Release a request, with or without a first token; a second call changes nothing."""
        if charge.is_finished:
            return
        charge.is_finished = True
        if charge.is_queued:
            self._leave_queue(charge)
        self.load.in_flight -= 1
        self.load.context_tokens -= charge.prompt_tokens + OUTPUT_ALLOWANCE_TOKENS
        self._kv_tail_tokens -= charge.kv_tokens
        self._blocks.release(charge.run)
        self._count_active()

    def _leave_queue(self, charge: Charge) -> None:
        charge.is_queued = False
        if charge.due_s is not None:
            del self.awaited[charge]
            self.due_s = next(iter(self.awaited.values()), inf)
        self._num_queued -= 1
        load = self.load
        load.queued_tokens -= charge.uncached_tokens
        # Exactly zero when empty: float sums taken apart in another order leave dust.
        load.queued_s = max(0.0, load.queued_s - charge.prefill_s) if self._num_queued else 0.0

    def _count_active(self) -> None:
        num_tokens = self._blocks.num_blocks * self._block_size
        self.load.active_tokens = num_tokens + self._kv_tail_tokens
