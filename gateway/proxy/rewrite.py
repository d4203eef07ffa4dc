"""Canonicalisation on the way to a worker: which form of a request is planned and forwarded.

What is planned is what is forwarded: ``Rewriter.plan`` stands in for ``Dispatcher.plan`` and hands
out the plan together with the bytes it was made from. In ``observe`` mode the bytes are always
those that came in; what the rules would save is looked at beside the requests, a sample of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from gateway.proxy.body import parse_json
from gateway.proxy.held import Imagined, held_tokens, known_held_tokens
from gateway.routing.dispatch import Plan
from prefix_index.canonical import (
    RULES,
    AppliedRule,
    Canonical,
    FirstSeen,
    Peek,
    better_form,
    canonicalise,
    keeps_system_first,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gateway.routing.dispatch import Dispatcher, Inbound
    from gateway.routing.pool import Pool
    from prefix_index.prompts import PromptReader

Mode = Literal["off", "observe", "rewrite"]

# In observe mode at most 2 requests a second are looked at: one of 128 KB takes 5 ms of the loop,
# so this is one percent of a core at the worst.
_OBSERVE_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A request in the form in which it is forwarded.

    Attributes:
        plan: Its plan; ``plan.inbound.body`` is what a parser reads from ``raw``.
        raw: Its bytes, before the gateway's own splices (alias, hints).
        rules: Names of the rules that changed it, for ``x-warmlane-canonicalized``.
        report: One entry per rule, for explain's ``canonicalization``; empty on the live path.
    """

    plan: Plan
    raw: bytes
    rules: tuple[str, ...] = ()
    report: tuple[dict[str, Any], ...] = ()


class Rewriter:
    """Applies a pool's ``canonicalize`` configuration; one per pool, one event loop only.

    Args:
        mode: ``off``, ``observe`` (rules are only reported) or ``rewrite``.
        rules: Rules to apply. None of them in ``observe`` mode stands for all: reporting is free
            of risk.
        memory: First-seen forms of tool sets; may be shared between pools.
        clock: Monotonic seconds.

    Attributes:
        num_changed: Requests that each rule changed; in ``observe`` mode, of those looked at, how
            many it would have changed.
        tokens_saved: Tokens that each rule would have saved, of the requests looked at.
    """

    def __init__(
        self,
        mode: Mode,
        rules: Collection[str],
        memory: FirstSeen,
        *,
        clock: Callable[[], float],
    ) -> None:
        if not rules and mode == "observe":
            rules = RULES
        self.mode = mode
        self.rules = tuple(rule for rule in RULES if rule in rules and mode != "off")
        self.num_changed: Counter[str] = Counter()
        self.tokens_saved: Counter[str] = Counter()
        self._memory = memory
        self._clock = clock
        self._placement: tuple[PromptReader, bool] | None = None
        self._imagined = Imagined()
        self._observation: asyncio.Task[Rewrite] | None = None
        self._observe_at_s = 0.0

    async def plan(
        self, dispatcher: Dispatcher, pool: Pool, inbound: Inbound, raw: bytes
    ) -> Rewrite:
        """Plan a request that will be sent, in the form in which to send it.

        Args:
            dispatcher: Reads prompts.
            pool: Where the request may go.
            inbound: The request as it came.
            raw: The bytes of its body.
        """
        if not self.rules or inbound.surface != "chat" or inbound.is_fixed:
            return Rewrite(await dispatcher.plan(pool, inbound), raw)
        if self.mode == "observe":
            plan = await dispatcher.plan(pool, inbound)
            self.look_beside(dispatcher, plan, raw)
            return Rewrite(plan, raw)
        form = self._canonical(pool, inbound, raw, self.rules, self._memory)
        if not form.is_changed:
            return Rewrite(await dispatcher.plan(pool, inbound), raw)
        plan = await dispatcher.plan(pool, _with_body(inbound, form.body))
        if better_form(known_held_tokens(pool, inbound), held_tokens(pool, plan)) == "as_sent":
            return Rewrite(await dispatcher.plan(pool, inbound), raw)
        names = _names(form)
        self.num_changed.update(names)
        return Rewrite(plan, form.raw, names)

    async def explain(
        self, dispatcher: Dispatcher, pool: Pool, inbound: Inbound, raw: bytes
    ) -> Rewrite:
        """Plan a request that is not sent, and report every rule; keeps no first-seen form.

        ``tokens_saved`` is how many more tokens a worker holds with the rule than without. In
        ``observe`` mode, where no rewritten form was ever sent, those looked at before count as
        held.
        """
        if not self.rules or inbound.surface != "chat" or inbound.is_fixed:
            return Rewrite(await dispatcher.plan(pool, inbound, in_full=True), raw)
        return await self._look(dispatcher, pool, inbound, raw, Peek(self._memory))

    async def settle(self) -> None:
        """Wait until no request is being looked at beside its way."""
        if self._observation is not None:
            await self._observation

    def look_beside(self, dispatcher: Dispatcher, plan: Plan, raw: bytes) -> None:
        """Look at what the rules would do to a request, beside its way; at a sample only."""
        if not self.rules or plan.inbound.surface != "chat":
            return
        is_busy = self._observation is not None and not self._observation.done()
        if is_busy or plan.unread or self._clock() < self._observe_at_s:
            return
        self._observe_at_s = self._clock() + _OBSERVE_EVERY_S
        look = self._look(dispatcher, plan.pool, plan.inbound, raw, self._memory)
        self._observation = asyncio.ensure_future(look)

    async def _look(
        self, dispatcher: Dispatcher, pool: Pool, inbound: Inbound, raw: bytes, memory: FirstSeen
    ) -> Rewrite:
        """Apply one rule after the other, and see how much is held of the form after each."""
        plan = sent = await dispatcher.plan(pool, inbound, in_full=True)
        held = held_as_sent = self._held(pool, sent)
        names: list[str] = []
        report = []
        form_raw = raw
        for rule in self.rules:
            form = self._canonical(pool, plan.inbound, form_raw, (rule,), memory)
            saved = 0
            if form.is_changed:
                changed = _with_body(inbound, form.body)
                plan, form_raw = await dispatcher.plan(pool, changed, in_full=True), form.raw
                before, held = held, self._held(pool, plan)
                saved = 0 if held is None or before is None else held - before
                names.append(rule)
            report.append(_entry(form.applied[0], saved))
        is_better = better_form(held_as_sent, held) == "rewritten"
        if self.mode == "rewrite" and is_better and names:
            for entry in report:
                entry["applied"] = entry["rule"] in names
            return Rewrite(plan, form_raw, tuple(names), tuple(report))
        if self.mode == "observe" and names and not isinstance(memory, Peek):
            self._imagine(plan, report)
        return Rewrite(sent, raw, report=tuple(report))

    def _imagine(self, plan: Plan, report: Sequence[Mapping[str, Any]]) -> None:
        """Write down a form that would have been sent, and what that would have saved."""
        for entry in report:
            if entry["tokens_saved"]:
                self.tokens_saved[entry["rule"]] += entry["tokens_saved"]
        self.num_changed.update(entry["rule"] for entry in report if "changed" in entry)
        self._imagined.add(plan.hashes or ())

    def _canonical(
        self, pool: Pool, inbound: Inbound, raw: bytes, rules: Collection[str], memory: FirstSeen
    ) -> Canonical:
        return canonicalise(
            inbound.body,
            raw,
            rules=rules,
            tenant=inbound.tenant,
            memory=memory,
            keeps_system_first=lambda: self._keeps_system_first(pool.reader),
            parse=parse_json,
        )

    def _keeps_system_first(self, reader: PromptReader | None) -> bool:
        """Ask the pool's template once per reader; without a template the answer is no."""
        if reader is None:
            return False
        if self._placement is None or self._placement[0] is not reader:
            answer = keeps_system_first(lambda messages: reader.render({"messages": messages}))
            self._placement = (reader, answer)
        return self._placement[1]

    def _held(self, pool: Pool, plan: Plan) -> int | None:
        """Return what is held of a form; rewritten forms were never sent in observe mode."""
        held = held_tokens(pool, plan)
        if held is None or plan.hashes is None or self.mode == "rewrite":
            return held
        return max(held, self._imagined.num_blocks(plan.hashes) * pool.block_size)


def _names(form: Canonical) -> tuple[str, ...]:
    return tuple(rule.rule for rule in form.applied if rule.applied)


def _with_body(inbound: Inbound, body: Mapping[str, Any]) -> Inbound:
    return replace(inbound, body=dict(body), known=None)


def _entry(rule: AppliedRule, saved: int) -> dict[str, Any]:
    """Describe what a rule would do, as plain JSON values."""
    entry: dict[str, Any] = {"rule": rule.rule, "applied": False, "tokens_saved": saved}
    details = {"changed": rule.changed, "refused": rule.refused, "tool_set": rule.tool_set}
    return entry | {name: value for name, value in details.items() if value}
