"""Traffic through the real dispatcher over simulated engines, every attempt logged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from gateway.routing.choose import Decision, RouteInput, choose
from gateway.routing.decision_line import decision_line
from gateway.routing.dispatch import Dispatcher, Inbound, Plan, Ticket
from gateway.routing.pool import Pool
from gateway.telemetry.decision_log import DecisionLine
from tests.gateway.engine_sim import Fleet
from tests.gateway.routing_parts import H100, Clock, chat

# Seconds since 1970 less the virtual clock.
UNIX_OFFSET_S = 1.7e9
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "for",
    "on",
    "that",
    "by",
    "this",
    "with",
    "you",
    "it",
    "not",
    "or",
    "be",
    "are",
    "from",
    "at",
    "as",
    "all",
]


@dataclass
class Traffic:
    """Growing conversations over shared instructions, and one-shot noise; ``sent`` in order."""

    pool: Pool
    on_finish: Callable[[Plan, Ticket], None] = lambda _plan, _ticket: None
    clock: Clock = field(default_factory=Clock)
    lines: list[DecisionLine] = field(default_factory=list)
    sent: list[Ticket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.routes = Dispatcher([self.pool], clock=self.clock, seed=7, on_finish=self._finished)
        self.fleet = Fleet(self.pool, self.routes, self.clock, speed=H100, slots=4, decode_s=0.4)

    async def run(
        self, num_requests: int, before: Callable[[Plan], None] = lambda _plan: None
    ) -> None:
        """Send requests some milliseconds apart; ``before`` sees each plan as it is sent."""
        random = Random(3)
        at_s = 0.0
        for inbound in conversations(random, num_requests):
            plan = await self.routes.plan(self.pool, inbound, in_full=True)
            at_s += random.expovariate(200.0)

            def send(plan: Plan = plan) -> None:
                before(plan)
                self.sent.append(self.fleet.send(plan))

            self.fleet.at(at_s, send)
        self.fleet.run()

    def _finished(self, plan: Plan, ticket: Ticket) -> None:
        self.lines.append(decision_line(plan, ticket, unix_offset_s=UNIX_OFFSET_S))
        self.on_finish(plan, ticket)


def conversations(random: Random, num_requests: int) -> list[Inbound]:
    systems = [text(random, 300) for _ in range(4)]
    histories: list[tuple[str, str]] = []
    found = []
    for number in range(num_requests):
        turn = text(random, random.randrange(10, 80))
        if random.random() < 0.2:
            found.append(chat(turn))
            continue
        if len(histories) < 24:
            histories.append((f"s{number}", random.choice(systems)))
        at = random.randrange(len(histories))
        session, history = histories[at]
        histories[at] = (session, f"{history} {turn}")
        found.append(chat(turn, system=history, headers={"x-session-id": session}))
    return found


def text(random: Random, num_words: int) -> str:
    return " ".join(random.choices(WORDS, k=num_words))


def again(line: DecisionLine) -> Decision:
    """Take the decision of a line again."""
    return choose(msgspec.convert(line.input, RouteInput), rotation=line.rotation)


def a_line(**more: Any) -> DecisionLine:
    values = {
        "t_unix_s": 1.0,
        "pool": "chat",
        "model": "m",
        "session": "00",
        "blocks": ["aa"],
        "prompt_tokens": 3,
        "rotation": 0,
        "input": {},
        "worker": "w0",
        "reason": "home",
        "source": "exact",
        "hit_tokens": 0,
        "outcome": "ok",
    }
    return DecisionLine(**(values | more))
