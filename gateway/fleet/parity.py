"""Whether a worker sees the tokens we see: a standing check, and what follows from its result.

A prediction is worth nothing unless our tokens equal the engine's. Probe bodies are compared when a
worker registers and every few minutes after, with the last live body beside them, and soon after a
token count in a live answer differed. A worker that diverged on a probe is routed by text until a
later check passes. A worker that does not answer says nothing: unknown, never diverged.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import structlog

from gateway.fleet.probes import PROBES
from gateway.fleet.worker_tokens import ask_tokens, can_ask
from gateway.routing.outcome import OK
from prefix_index.chat import TemplateRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gateway.routing.dispatch import Plan, Ticket
    from gateway.routing.pool import Pool, Worker
    from gateway.upstream.client import Upstream
    from prefix_index.prompts import PromptReader

# A template or tokenizer changes with a roll-out; six short requests in five minutes cost nothing.
CHECK_EVERY_S = 300.0
# After a live count differed, or a check without an answer.
CHECK_AGAIN_S = 15.0
# A live body beyond this is not sent to a worker once more only to compare it.
MAX_LIVE_TOKENS = 32_768
# Shown on either side of the first differing token.
TEXT_CHARS = 32

Parity = Literal[1, 0, -1]

log = structlog.get_logger("warmlane")


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token in which a worker and we differ.

    Attributes:
        probe: Which body; ``live`` for a request's.
        position: Tokens before it.
        ours: Our id; None if our prompt ends there.
        theirs: The worker's.
        our_tokens: Our token count.
        their_tokens: The worker's.
        text: Text around it as we render it, the place marked; empty for live text.
    """

    probe: str
    position: int
    ours: int | None
    theirs: int | None
    our_tokens: int
    their_tokens: int
    text: str


class ParityCheck:
    """Compares one worker's tokens with ours; event loop only.

    Args:
        pool: Its pool; the worker's mode is set there.
        worker: The worker.
        upstream: Its connections.
        resume: Called when a diverged worker is equal again, to believe its events as before.
        log_prompts: Whether text of live prompts may be logged.
        clock: Monotonic seconds.

    Attributes:
        result: Of the last check that had an answer: 1 equal, 0 diverged, -1 none yet.
        divergence: The last one found; None while equal.
    """

    def __init__(
        self,
        pool: Pool,
        worker: Worker,
        upstream: Upstream,
        *,
        resume: Callable[[], None],
        log_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.result: Parity = -1
        self.divergence: Divergence | None = None
        self._pool = pool
        self._worker = worker
        self._upstream = upstream
        self._resume = resume
        self._log_prompts = log_prompts
        self._clock = clock
        self._due_s = float("-inf")
        self._is_running = False
        self._checked_s = float("-inf")
        self._live: Plan | None = None
        self._live_divergence: Divergence | None = None

    @property
    def value(self) -> Parity:
        """What the gauge shows: probes and live token counts together."""
        if self.result == 0 or self._live_divergence is not None or self._worker.parity == 0:
            return 0
        return 1 if self.result == 1 or self._worker.parity == 1 else -1

    @property
    def is_due(self) -> bool:
        """Whether a check should be made now."""
        is_possible = self._pool.reader is not None and can_ask(self._pool.engine, {})
        return is_possible and not self._is_running and self._clock() >= self._due_s

    def restarted(self) -> None:
        """The worker's process is a new one: it may render otherwise."""
        self._due_s = float("-inf")

    def finished(self, plan: Plan, ticket: Ticket) -> None:
        """Take note of an attempt that is over; O(1)."""
        if plan.prompt is None or ticket.outcome is not OK:
            return
        if plan.num_tokens <= MAX_LIVE_TOKENS:
            self._live = plan
        if self._worker.num_diverged:
            self._due_s = min(self._due_s, self._checked_s + CHECK_AGAIN_S)

    async def check(self) -> Parity:
        """Compare all probes and the last live body; return what the probes say."""
        reader = self._pool.reader
        if reader is None or not can_ask(self._pool.engine, {}):
            return -1
        self._is_running = True
        try:
            result, divergence = await self._compare_probes(reader)
            if result == 1:
                await self._compare_live(reader)
        finally:
            self._is_running = False
            self._live = None
            self._checked_s = self._clock()
        self._due_s = self._checked_s + (CHECK_AGAIN_S if result == -1 else CHECK_EVERY_S)
        self._apply(result, divergence)
        return result

    async def _compare_probes(self, reader: PromptReader) -> tuple[Parity, Divergence | None]:
        # What each kind of body said: nothing yet, or equal.
        is_equal: dict[bool, bool] = {}
        for name, probe in PROBES.items():
            try:
                ours = _our_tokens(reader, probe)
            except TemplateRefusedError:
                continue  # a model without tools or system text; the engine refuses it too
            is_equal.setdefault("messages" in probe, False)
            theirs = await self._ask(probe, self._pool.models[0])
            if theirs is None:
                continue
            if ours != theirs:
                text = await asyncio.to_thread(_mark_text, reader, probe, _first(ours, theirs))
                return 0, _divergence(name, ours, theirs, text)
            is_equal["messages" in probe] = True
        # An endpoint that knows no chat bodies says nothing about them.
        return (1, None) if is_equal and all(is_equal.values()) else (-1, None)

    async def _compare_live(self, reader: PromptReader) -> None:
        plan = self._live
        if plan is None or plan.prompt is None or not can_ask(self._pool.engine, plan.inbound.body):
            return
        body = plan.inbound.body
        if "messages" not in body and not isinstance(body.get("prompt"), str):
            return
        model = self._pool.aliases.get(plan.inbound.model, plan.inbound.model)
        theirs = await self._ask(body, model)
        if theirs is None:
            return
        ours = list(plan.prompt.token_ids)
        if ours == theirs:
            self._live_divergence = None
            return
        text = ""
        if self._log_prompts:
            text = await asyncio.to_thread(_mark_text, reader, body, _first(ours, theirs))
        found = _divergence("live", ours, theirs, text)
        if self._live_divergence is None:
            # One odd body is no reason to route all others by text.
            self._log(found, "its token counts are compared with every answer's")
        self._live_divergence = found

    async def _ask(self, body: Mapping[str, Any], model: str) -> list[int] | None:
        return await ask_tokens(self._upstream, self._pool.engine, model, body)

    def _apply(self, result: Parity, divergence: Divergence | None) -> None:
        if result == -1:
            return
        was, self.result = self.result, result
        if divergence is not None:
            if was != 0 or divergence != self.divergence:
                self._log(divergence, "it is routed by text until a check passes")
            self._pool.set_mode(self._worker, "text")
        elif was == 0:
            log.warning("parity_restored", pool=self._pool.name, worker=self._worker.id)
            self._pool.set_mode(self._worker, "approximate")
            self._resume()
        self.divergence = divergence

    def _log(self, found: Divergence, effect: str) -> None:
        log.warning(
            "parity_diverged",
            pool=self._pool.name,
            worker=self._worker.id,
            probe=found.probe,
            position=found.position,
            our_token=found.ours,
            their_token=found.theirs,
            our_tokens=found.our_tokens,
            their_tokens=found.their_tokens,
            text=found.text,
            effect=effect,
        )


def _our_tokens(reader: PromptReader, body: Mapping[str, Any]) -> list[int]:
    draft = reader.chat(body) if "messages" in body else reader.completion(body["prompt"])
    return list(draft.complete().token_ids)


def _first(ours: Sequence[int], theirs: Sequence[int]) -> int:
    at, end = 0, min(len(ours), len(theirs))
    while at < end and ours[at] == theirs[at]:
        at += 1
    return at


def _divergence(probe: str, ours: Sequence[int], theirs: Sequence[int], text: str) -> Divergence:
    at = _first(ours, theirs)
    return Divergence(
        probe,
        at,
        ours[at] if at < len(ours) else None,
        theirs[at] if at < len(theirs) else None,
        len(ours),
        len(theirs),
        text,
    )


def _mark_text(reader: PromptReader, body: Mapping[str, Any], position: int) -> str:
    """Return the rendered text around a token, with a mark before it; for a thread.

    The place is found by bisection: the longest beginning of the text with ``position`` tokens.
    Beginnings of a text need not have beginnings of its tokens, so the mark may be off by a token;
    ids and position are exact.
    """
    text = reader.render(body) if "messages" in body else str(body["prompt"])
    around = reader.completion("").complete().num_tokens
    if "messages" not in body:
        position = max(0, position - around)
    # ``at`` characters have no more than ``position`` tokens.
    at, high = 0, len(text)
    while at < high:
        middle = (at + high + 1) // 2
        if reader.completion(text[:middle]).complete().num_tokens - around <= position:
            at = middle
        else:
            high = middle - 1
    return f"{text[max(0, at - TEXT_CHARS) : at]}>>>{text[at : at + TEXT_CHARS]}"
