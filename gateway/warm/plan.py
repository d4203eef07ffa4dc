"""Which worker gets which document: a pure function of plain numbers.

Items are taken by pin, priority and how often their tokens are reused. Each goes to its key's home
on the ring, where its requests will look for it, and further along the ring where that worker
cannot take it. Nothing that is reused more often is evicted for it, and what a worker holds already
is not computed again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gateway.routing.cost import EVICTION_FILL, CostModel, prefill_s
from gateway.worth.rule import MANAGEMENT_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Action = Literal["warm", "skip_held", "skip_capacity", "skip_worth", "skip_budget", "no_worker"]
Tier = Literal["gpu", "cpu", "disk", "remote"]

# Reuses an hour that are expected of what nobody has asked for yet, while the operator says that
# somebody will: once.
UNKNOWN_REUSES = 1.0


@dataclass(frozen=True, slots=True)
class Held:
    """Leading tokens of an item that a worker holds, and the slowest tier among them."""

    tokens: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Wanted:
    """One item, as the plan reads it.

    Attributes:
        id: Its name.
        tokens: Shareable tokens.
        context_tokens: What a request about it needs at least.
        order: Workers to try, home first; all others come after them.
        copies: Workers that shall hold it.
        pin: Whether it may push out what is worth more.
        priority: Higher ones first.
        reuses: Reuses an hour that are expected.
        held: Worker -> what it holds.
    """

    id: str
    tokens: int
    context_tokens: int
    order: Sequence[str]
    copies: int = 1
    pin: bool = False
    priority: int = 0
    reuses: float = UNKNOWN_REUSES
    held: Mapping[str, Held] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Host:
    """One worker, as the plan reads it.

    Attributes:
        id: Worker id.
        why: Why it takes nothing (draining, ejected, ...); empty if it does.
        block_size: Tokens of its blocks.
        context_tokens: Longest prompt and answer; 0 = unknown.
        capacity_tokens: KV tokens on its device; 0 = unknown, taken as enough.
        active_tokens: What requests in flight need of it.
        reused: Reuses an hour and tokens of each hot document that it holds there.
        cpu_free_tokens: Room in its CPU tier; 0 = it has none.
        bytes_per_token: KV bytes of a token; None = unknown.
        model: Its cost constants; None = unknown.
    """

    id: str
    why: str = ""
    block_size: int = 16
    context_tokens: int = 0
    capacity_tokens: int = 0
    active_tokens: int = 0
    reused: Sequence[tuple[float, int]] = ()
    cpu_free_tokens: int = 0
    bytes_per_token: float | None = None
    model: CostModel | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """What is done about one copy of an item.

    Attributes:
        id: The item.
        worker: Where; None where nobody can take it.
        tier: Where it will be kept.
        tokens: Shareable tokens in whole blocks of the worker.
        bytes: Of KV; None = unknown.
        seconds: Prefill of what is missing; None = unknown.
        gain_s: What an hour's reuses save; None = unknown.
        action: What is done.
        reason: Why nothing is done; empty for ``warm``.
    """

    id: str
    worker: str | None
    tier: Tier
    tokens: int
    bytes: int | None
    seconds: float | None
    gain_s: float | None
    action: Action
    reason: str = ""


class _Room:
    """What is left of one worker while the plan is made."""

    __slots__ = ("_reused", "_sums", "cpu_free", "host", "taken")

    def __init__(self, host: Host) -> None:
        self.host = host
        self.taken = 0
        self.cpu_free = host.cpu_free_tokens
        # Rising reuses, and the tokens of all that are reused at least as often.
        ranked = sorted(host.reused)
        self._reused = [reuses for reuses, _ in ranked]
        self._sums = [0] * (len(ranked) + 1)
        for at in range(len(ranked) - 1, -1, -1):
            self._sums[at] = self._sums[at + 1] + ranked[at][1]

    def free_tokens(self, reuses: float, *, pin: bool) -> float:
        """Return how many tokens may be put there without pushing out what is worth more."""
        host = self.host
        if not host.capacity_tokens:
            return float("inf")
        free = EVICTION_FILL * host.capacity_tokens - host.active_tokens - self.taken
        # Just as often is not more often, unless it is there already: what is held stays.
        return free if pin else free - self._sums[bisect_left(self._reused, reuses)]

    def passes(self, tokens: int, reuses: float, *, pin: bool) -> bool:
        """Whether it can be computed there at all, wherever it is kept afterwards."""
        return self.free_tokens(reuses, pin=pin) + self.taken >= tokens


def make_plan(
    wanted: Sequence[Wanted], hosts: Sequence[Host], budget_tokens: int | None = None
) -> list[Placement]:
    """Place all items. Pure; O(items x copies), and x workers only where homes are full.

    Args:
        wanted: The items, of one pool.
        hosts: Its workers.
        budget_tokens: Most tokens to compute; None = no limit.

    Returns:
        One placement per copy, in the order in which to send them: what goes to a CPU tier passes
        through the device first, and is pushed on by what comes after it.
    """
    rooms = {host.id: _Room(host) for host in hosts}
    left = float("inf") if budget_tokens is None else float(budget_tokens)
    placements: list[Placement] = []
    ranked = sorted(wanted, key=lambda item: (not item.pin, -item.priority, -item.reuses))
    for item in ranked:
        for placement, num_new in _place(item, rooms, left):
            placements.append(placement)
            left -= num_new
    return sorted(placements, key=lambda placement: placement.tier == "gpu")


def _place(item: Wanted, rooms: Mapping[str, _Room], left: float) -> list[tuple[Placement, int]]:
    """Place one item's copies; with each the tokens that it takes of the budget."""
    found = [(_held(item, rooms[worker]), 0) for worker in _holders(item, rooms)]
    used = {placement.worker for placement, _ in found}
    whys: list[tuple[Action, str]] = []
    for worker in _ways(item, rooms):
        if len(found) >= item.copies:
            break
        if worker in used:
            continue
        placement, num_new = _try(item, rooms[worker], left, whys)
        if placement is not None:
            found.append((placement, num_new))
            left -= num_new
    num_missing = min(item.copies, max(1, len(rooms))) - len(found)
    return found + [(_nowhere(item, whys), 0)] * max(0, num_missing)


def _holders(item: Wanted, rooms: Mapping[str, _Room]) -> list[str]:
    """Return the workers that hold all of it, those first where its requests will look."""
    holders = [
        worker
        for worker, held in item.held.items()
        if worker in rooms and held.tokens >= _whole(item.tokens, rooms[worker].host)
    ]
    at = {worker: position for position, worker in enumerate(item.order)}
    holders.sort(key=lambda worker: at.get(worker, len(at)))
    return [worker for worker in holders if not rooms[worker].host.why][: item.copies]


def _ways(item: Wanted, rooms: Mapping[str, _Room]) -> Sequence[str]:
    first = [worker for worker in item.order if worker in rooms]
    if len(first) == len(rooms):
        return first
    known = set(first)
    rest = [worker for worker in rooms if worker not in known]
    # The emptiest next: the ring has no more to say about them.
    rest.sort(key=lambda worker: -rooms[worker].free_tokens(0.0, pin=True))
    return [*first, *rest]


def _try(
    item: Wanted, room: _Room, left: float, whys: list[tuple[Action, str]]
) -> tuple[Placement | None, int]:
    """Put one copy there if it can be, and take its room; else say why not."""
    host = room.host
    tokens = _whole(item.tokens, host)
    if host.why:
        whys.append(("no_worker", f"{host.id} is {host.why}"))
        return None, 0
    if not tokens:
        whys.append(("no_worker", f"{host.id} has blocks of {host.block_size} tokens"))
        return None, 0
    if host.context_tokens and item.context_tokens > host.context_tokens:
        whys.append(("no_worker", f"{host.id} has a context of {host.context_tokens} tokens"))
        return None, 0
    if host.capacity_tokens and tokens + 1 > EVICTION_FILL * host.capacity_tokens:
        whys.append(("no_worker", f"{host.id} has room for {host.capacity_tokens} tokens in all"))
        return None, 0
    held = item.held.get(host.id)
    missing = tokens - (0 if held is None else min(tokens, held.tokens))
    if missing > left:
        reason = f"{missing} tokens, {int(left)} are left of the budget"
        return _placement(item, host, "gpu", "skip_budget", reason, missing), 0
    tier = _tier(item, room, tokens)
    if tier is None:
        whys.append(_why_full(item, room, tokens))
        return None, 0
    if tier == "gpu":
        room.taken += tokens
    else:
        room.cpu_free -= tokens
    return _placement(item, host, tier, "warm", "", missing), missing


def _tier(item: Wanted, room: _Room, tokens: int) -> Tier | None:
    """Return where there is room for it that costs nobody more than it gains."""
    if room.free_tokens(item.reuses, pin=item.pin) >= tokens:
        return "gpu"
    host = room.host
    if room.cpu_free >= tokens and room.passes(tokens, item.reuses, pin=item.pin):
        model = host.model
        if model is None:
            return "cpu"
        restore_s = tokens / model.restore_cpu_tokens_per_s + MANAGEMENT_S
        if prefill_s(model, tokens, tokens) > restore_s:
            return "cpu"
    return None


def _why_full(item: Wanted, room: _Room, tokens: int) -> tuple[Action, str]:
    where, num_all = room.host.id, room.host.capacity_tokens
    if room.free_tokens(item.reuses, pin=True) >= tokens:
        return "skip_worth", f"{where} would evict what is reused more often"
    return "skip_capacity", f"{where} has no room left for {tokens} of its {num_all} tokens"


# What is told of an item that went nowhere, the most hopeful reason first.
_RANKS: dict[Action, int] = {"skip_worth": 0, "skip_capacity": 1, "no_worker": 2}


def _nowhere(item: Wanted, whys: Sequence[tuple[Action, str]]) -> Placement:
    if not whys:
        reason = "there is no other worker" if item.copies > 1 else "the pool has no worker"
        return Placement(item.id, None, "gpu", item.tokens, None, None, None, "no_worker", reason)
    least = min(_RANKS[action] for action, _ in whys)
    action = next(action for action, _ in whys if _RANKS[action] == least)
    reasons = [reason for found, reason in whys if found == action]
    more = f", and {len(reasons) - 3} others likewise" if len(reasons) > 3 else ""
    reason = "; ".join(reasons[:3]) + more
    return Placement(item.id, None, "gpu", item.tokens, None, None, None, action, reason)


def _held(item: Wanted, room: _Room) -> Placement:
    host, held = room.host, item.held[room.host.id]
    if held.tier == "gpu":
        room.taken += _whole(item.tokens, host)
    reason = f"held in {held.tier}"
    return _placement(item, host, held.tier, "skip_held", reason, 0)


def _placement(
    item: Wanted, host: Host, tier: Tier, action: Action, reason: str, missing: int
) -> Placement:
    tokens, model = _whole(item.tokens, host), host.model
    seconds = gain_s = None
    if model is not None:
        seconds = prefill_s(model, missing, tokens) if missing else 0.0
        saved_s = prefill_s(model, tokens, tokens)
        if tier != "gpu":
            saved_s -= tokens / model.restore_cpu_tokens_per_s + MANAGEMENT_S
        gain_s = item.reuses * saved_s
    num_bytes = None if host.bytes_per_token is None else round(tokens * host.bytes_per_token)
    return Placement(item.id, host.id, tier, tokens, num_bytes, seconds, gain_s, action, reason)


def _whole(tokens: int, host: Host) -> int:
    return tokens // host.block_size * host.block_size
