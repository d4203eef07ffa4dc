"""The miss report: which requests hit less than a near-duplicate before them, and why.

``observe`` is told of every attempt and only looks up whether its prompt goes on where one before
it ended. What does not is compared behind the requests, in one thread, at a bounded rate; a prompt
that is not compared is counted as such.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from gateway.misses.causes import Cause
from gateway.misses.features import features, message_features
from gateway.misses.finding import Finding, Finished, find, nearest
from gateway.misses.known import Known, num_messages
from gateway.misses.locate import Place
from gateway.misses.memory import Memory
from gateway.misses.tally import Loss, Tally
from gateway.routing.outcome import OK
from prefix_index.blocks import usable_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.routing.dispatch import Plan, Ticket
    from prefix_index.draft import Prompt

_T = TypeVar("_T")

# Prompts waiting to be compared; more than this in one burst are not.
MAX_QUEUE = 256
# What comparing may take of a core over a long time, and at once in seconds of CPU. One comparison
# takes 1 to 50 ms by the prompt's length: one percent still compares a prompt a second, which finds
# whatever is common within minutes, and no burst of new prompts takes a second core.
COMPARED_SHARE = 0.01
BURST_S = 0.5
# Conversations whose newest turn takes the place of the one before: 50 us each, so one percent of a
# core. Beyond it the older turn stays, and the next one is found by it as well.
UPDATES_PER_S = 200.0
# Prompts that are compared in full with a new one: the best by shared features.
MAX_TWINS = 3
# A loss below this many blocks, or below this share of the prompt, is rounding, the phrases that
# two questions have in common, a template's own tokens.
MIN_LOST_BLOCKS = 2
MIN_LOST_RATIO = 0.02
# Around the place, where the operator allows text.
TEXT_CHARS = 40

_IDENTITIES = frozenset({"cache_key", "document", "knowledge_base", "session"})
_DOCUMENTS = frozenset({"document", "knowledge_base"})

log = structlog.get_logger("warmlane")


class MissReport:
    """Observes finished requests; event loop only.

    Args:
        log_prompts: Whether examples may carry text of prompts.
        clock: Monotonic seconds.
        cpu_clock: Seconds of CPU that the calling thread has taken.
        memory: Recent prompts.

    Attributes:
        tally: Tokens lost.
        settle: Has attempts that wait observed; whoever reads calls it first. Set by who lets them
            wait.
    """

    def __init__(
        self,
        *,
        log_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        memory: Memory | None = None,
    ) -> None:
        self.tally = Tally(clock)
        self.settle: Callable[[], None] = lambda: None
        self._memory = Memory() if memory is None else memory
        self._log_prompts = log_prompts
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._queue: deque[Finished] = deque()
        self._task: asyncio.Task[None] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._credit_cpu_s = BURST_S
        self._credit_s = clock()
        self._update_due_s = float("-inf")
        # By which a comparison sees that its prompt may have been forgotten meanwhile.
        self._num_purges = 0

    def observe(self, plan: Plan, ticket: Ticket, at_s: float | None = None) -> None:
        """Take note of a finished attempt; quick, and never raises.

        Args:
            plan: The request.
            ticket: Of the attempt.
            at_s: When it was over; None = now.
        """
        prompt = plan.prompt
        if prompt is None or ticket.outcome is not OK:
            return
        body = plan.inbound.body
        num_blocks = usable_blocks(prompt.num_tokens, prompt.block_size)
        if not num_blocks or not plan.is_comparable:
            return
        observed = ticket.observed_hit_tokens
        hit = ticket.predicted_hit_tokens if observed is None else observed
        hit = min(hit, num_blocks * prompt.block_size)
        self.tally.served(prompt.num_tokens, hit)
        now_s = self._clock() if at_s is None else at_s
        entry = self._memory.extended_by(plan.pool.name, plan.inbound.tenant, prompt, num_blocks)
        if entry is None:
            self._enqueue(plan, prompt, ticket, hit, now_s)
            return
        before = entry.known
        # A prompt that is asked again, word for word, replaces nothing.
        is_new = before.prompt is not prompt or before.num_messages != num_messages(body)
        if is_new and now_s >= self._update_due_s:
            # Those of one burst are all taken over: what was not spent in the last second is left.
            self._update_due_s = max(self._update_due_s, now_s - 1.0) + 1.0 / UPDATES_PER_S
            known = Known.from_plan(plan, prompt, now_s)
            if known.has_text_only(since=before.num_messages):
                self._memory.replace(entry, known, message_features(known, before.num_messages))
            else:
                self._memory.drop(entry)
        lost = before.usable_tokens - hit
        if lost >= MIN_LOST_BLOCKS * prompt.block_size:
            known = Known.from_plan(plan, prompt, now_s)
            self._count_uncached(_finished(known, plan, ticket, hit), before, lost)

    def report(self) -> dict[str, Any]:
        """Return ``GET /admin/v1/misses``: causes with the most expensive first, and totals."""
        self.settle()
        return self.tally.report()

    def forget(self, tenant: str | None, document: str) -> int:
        """Forget what is kept of a tenant's or a document's requests.

        Args:
            tenant: Whose; None = anybody's.
            document: Only what was about this document; empty = everything.

        Returns:
            How many prompts and groups of losses were forgotten.
        """
        self.settle()  # what is told of later must not bring it back
        num_prompts = 0
        if not document:
            # Prompts are kept without the identity of their document: they leave with their tenant,
            # or as newer ones come.
            num_prompts = self._memory.forget(lambda known: known.scope[1] == tenant)
            kept = [one for one in self._queue if one.known.scope[1] != tenant]
            num_prompts += len(self._queue) - len(kept)
            self._queue = deque(kept)
            self._num_purges += 1
        return num_prompts + self.tally.forget(tenant, document)

    async def settled(self) -> None:
        """Return once everything that is over is compared."""
        self.settle()
        while self._task is not None:
            await self._task

    async def close(self) -> None:
        """Stop comparing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            # A task that was cancelled before its first step never ran its own clean-up.
            self._task = None
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _enqueue(self, plan: Plan, prompt: Prompt, ticket: Ticket, hit: int, now_s: float) -> None:
        if len(self._queue) >= MAX_QUEUE or not self._may_compare():
            self.tally.count("not_compared")
            return
        known = Known.from_plan(plan, prompt, now_s)
        self._queue.append(_finished(known, plan, ticket, hit))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._compare_queued())

    def _may_compare(self) -> bool:
        now_s = self._clock()
        earned_s = (now_s - self._credit_s) * COMPARED_SHARE
        self._credit_cpu_s = min(BURST_S, self._credit_cpu_s + earned_s)
        self._credit_s = now_s
        return self._credit_cpu_s > 0.0

    async def _run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run a part of a comparison in the thread, and pay for the CPU it takes."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "misses")
        loop = asyncio.get_running_loop()
        result, cpu_s = await loop.run_in_executor(self._executor, self._timed, function, *args)
        self._credit_cpu_s -= cpu_s
        return result

    def _timed(self, function: Callable[..., _T], *args: Any) -> tuple[_T, float]:
        """Return what a function returns, and the CPU seconds of this thread that it took."""
        begun_s = self._cpu_clock()
        return function(*args), self._cpu_clock() - begun_s

    async def _compare_queued(self) -> None:
        try:
            while self._queue:
                finished = self._queue.popleft()
                if self._credit_cpu_s <= 0.0:  # those before it took more than was thought
                    self.tally.count("not_compared")
                    continue
                try:
                    await self._compare(finished)
                except Exception as error:  # a report must never end because of one odd body
                    self.tally.count("failed")
                    # Its words may quote the body.
                    log.warning("miss_not_compared", error=type(error).__name__)
        finally:
            self._task = None

    async def _compare(self, finished: Finished) -> None:
        known = finished.known
        if not known.has_text_only():
            self.tally.count("not_compared")
            return
        num_purges = self._num_purges
        identity = _identity(finished.plan, _IDENTITIES)
        found = await self._run(features, known, identity)
        missed = known.usable_tokens - finished.hit_tokens
        minimum = MIN_LOST_BLOCKS * known.prompt.block_size
        twins = self._memory.near(found, MAX_TWINS) if missed >= minimum else []
        if twins:
            twin, lost_behind, shared = await self._run(nearest, finished, twins)
            if twin is not None:
                await self._judge(finished, twin, lost_behind, shared)
        self.tally.count("compared")
        if num_purges == self._num_purges:
            self._memory.add(known, found)

    async def _judge(self, finished: Finished, twin: Known, lost: int, shared: int) -> None:
        block_size = finished.known.prompt.block_size
        minimum = MIN_LOST_BLOCKS * block_size
        if lost >= max(minimum, MIN_LOST_RATIO * finished.known.usable_tokens):
            finding = await self._run(find, finished, twin, lost, shared)
            self._count(finished, finding)
        uncached = shared * block_size - finished.hit_tokens
        if uncached >= minimum:
            self._count_uncached(finished, twin, uncached)

    def _count_uncached(self, finished: Finished, before: Known, lost: int) -> None:
        if finished.decided_s < before.finished_s:
            return  # siblings of one burst: there was nothing to hit yet
        is_elsewhere = finished.others_hit_tokens >= finished.hit_tokens + lost
        cause = Cause.ROUTED_ELSEWHERE if is_elsewhere else Cause.NOT_CACHED
        place = Place(cause, "cache", "")
        self._count(finished, Finding(lost, place, finished.hit_tokens))

    def _count(self, finished: Finished, finding: Finding) -> None:
        plan, place = finished.plan, finding.place
        example: dict[str, Any] = {
            "request_id": plan.inbound.request_id,
            "worker": finished.worker,
            "place": place.path,
            "char": place.char,
            "token": finding.token,
            "prompt_tokens": plan.num_tokens,
            "hit_tokens": finished.hit_tokens,
            "tokens_lost": finding.tokens,
        }
        if self._log_prompts and place.char is not None:
            start = max(0, place.char - TEXT_CHARS)
            example["text"] = place.text[start : place.char + TEXT_CHARS]
        self.tally.add(
            Loss(
                place.cause,
                place.segment,
                plan.pool.name,
                plan.inbound.tenant,
                plan.inbound.model,
                _identity(plan, _DOCUMENTS),
                finding.tokens,
                example,
            )
        )


def _finished(known: Known, plan: Plan, ticket: Ticket, hit: int) -> Finished:
    others = (
        c.hit_gpu + c.hit_cpu + c.hit_disk + c.hit_remote
        for c in ticket.decision.input.candidates
        if c.worker != ticket.worker.id
    )
    decided_s = ticket.decision.input.now_s
    return Finished(known, plan, hit, max(others, default=0), ticket.worker.id, decided_s)


def _identity(plan: Plan, kinds: frozenset[str]) -> str:
    key = plan.key
    return str(key) if key.kind in kinds else ""
