"""Which worker gets which document: a pure function of plain numbers.

Items are taken by pin, priority and how often their tokens are reused. Each goes to its key's home
on the ring, where its requests will look for it, and further along the ring where that worker
cannot take it. Nothing that is reused more often is evicted for it, and what a worker holds already
is not computed again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Literal

from gateway.routing.cost import EVICTION_FILL, CostModel, prefill_s
from gateway.worth.rule import MANAGEMENT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

Action = Literal["warm", "skip_held", "skip_capacity", "skip_worth", "skip_budget", "no_worker"]
Tier = Literal["gpu", "cpu", "disk", "remote"]

# Reuses an hour that are expected of what nobody has asked for yet, while the operator says that
# somebody will: once.
UNKNOWN_REUSES = 1.0
# Workers whose reason is told where nobody can take a copy.
MAX_REASONS = 3
# What is told of a copy that went nowhere: the most hopeful reason.
_RANKS = {"skip_worth": 0, "skip_capacity": 1, "no_worker": 2}


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
        adapter: LoRA adapter that its requests run on; empty = none.
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
    adapter: str = ""


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
        adapters: LoRA adapters that it serves.
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
    adapters: Collection[str] = ()


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

    __slots__ = ("_protected", "_reused", "_sums", "cpu_free", "free", "host", "taken")

    def __init__(self, host: Host) -> None:
        self.host = host
        self.taken = 0
        self.cpu_free = host.cpu_free_tokens
        capacity = host.capacity_tokens
        # Not taken by requests or by this plan; what is cached there may be evicted.
        self.free = EVICTION_FILL * capacity - host.active_tokens if capacity else inf
        # Rising reuses, and the tokens of all that are reused at least as often.
        ranked = sorted(host.reused)
        self._reused = [reuses for reuses, _ in ranked]
        self._sums = [0] * (len(ranked) + 1)
        for at in range(len(ranked) - 1, -1, -1):
            self._sums[at] = self._sums[at + 1] + ranked[at][1]
        self._protected: dict[float, int] = {}

    def take(self, tokens: int) -> None:
        """Book tokens on the device."""
        self.taken += tokens
        self.free -= tokens

    def free_tokens(self, item: Wanted) -> float:
        """Return how many tokens may be put there without pushing out what is worth more.

        What is reused just as often was there first, and stays.
        """
        if item.pin or not self._reused:
            return self.free
        protected = self._protected.get(item.reuses)
        if protected is None:
            protected = self._sums[bisect_left(self._reused, item.reuses)]
            self._protected[item.reuses] = protected
        return self.free - protected


@dataclass(slots=True)
class _State:
    """A plan while it is made.

    Attributes:
        rooms: Worker id -> what is left of it.
        left: Tokens left of the budget.
        hopeless: (reuses, pin) -> the fewest tokens that no worker had room for, and why. Room only
            shrinks, so that what needs as much need not ask again.
    """

    rooms: Mapping[str, _Room]
    left: float
    hopeless: dict[tuple[float, bool], tuple[int, _Whys]] = field(default_factory=dict)


class _Whys:
    """Why nobody took a copy: the most hopeful reasons, and how many there were."""

    __slots__ = ("_count", "_reasons", "action")

    def __init__(self) -> None:
        self.action: Action | None = None
        self._reasons: list[tuple[Host, str]] = []
        self._count = 0

    def add(self, action: Action, host: Host, reason: str) -> None:
        """Take one worker's reason; the text follows the worker's id."""
        if self.action is not None and _RANKS[action] > _RANKS[self.action]:
            return
        if action != self.action:
            self.action, self._count = action, 0
            self._reasons.clear()
        self._count += 1
        if len(self._reasons) < MAX_REASONS:
            self._reasons.append((host, reason))

    def __str__(self) -> str:
        text = "; ".join(f"{host.id} {reason}" for host, reason in self._reasons)
        num_more = self._count - len(self._reasons)
        return f"{text}, and {num_more} others likewise" if num_more else text


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
    left = inf if budget_tokens is None else float(budget_tokens)
    state = _State({host.id: _Room(host) for host in hosts}, left)
    ranked = sorted(wanted, key=lambda item: (not item.pin, -item.priority, -item.reuses))
    placements = [placement for item in ranked for placement in _place(item, state)]
    return sorted(placements, key=lambda placement: placement.tier == "gpu")


def _place(item: Wanted, state: _State) -> list[Placement]:
    """Place one item's copies."""
    rooms = state.rooms
    found = [_held(item, rooms[worker]) for worker in _holders(item, rooms)]
    missing = min(item.copies, max(1, len(rooms))) - len(found)
    if not missing:
        return found
    used = {placement.worker for placement in found}
    whys = _Whys()
    known = state.hopeless.get((item.reuses, item.pin))
    is_plain = not item.held and not item.adapter
    if known is not None and item.tokens >= known[0] and is_plain:
        whys = known[1]
    else:
        for worker in _ways(item, rooms):
            if worker not in used:
                placement = _try(item, rooms[worker], state, whys)
                if placement is not None:
                    found.append(placement)
                    missing -= 1
                    if not missing:
                        return found
        if is_plain and not found and whys.action in ("skip_worth", "skip_capacity"):
            state.hopeless[item.reuses, item.pin] = item.tokens, whys
    return found + [_nowhere(item, whys)] * missing


def _holders(item: Wanted, rooms: Mapping[str, _Room]) -> list[str]:
    """Return the workers that hold all of it, those first where its requests will look."""
    if not item.held:
        return []
    holders = [
        worker
        for worker, held in item.held.items()
        if worker in rooms
        and not rooms[worker].host.why
        and held.tokens >= _whole(item.tokens, rooms[worker].host)
    ]
    at = {worker: position for position, worker in enumerate(item.order)}
    holders.sort(key=lambda worker: at.get(worker, len(at)))
    return holders[: item.copies]


def _ways(item: Wanted, rooms: Mapping[str, _Room]) -> Iterator[str]:
    """Yield the workers along the ring, then all others: the emptiest next."""
    first = [worker for worker in item.order if worker in rooms]
    yield from first
    if len(first) < len(rooms):
        known = set(first)
        rest = [worker for worker in rooms if worker not in known]
        rest.sort(key=lambda worker: -rooms[worker].free)
        yield from rest


def _try(item: Wanted, room: _Room, state: _State, whys: _Whys) -> Placement | None:
    """Put one copy there if it can be, and take its room; else say why not."""
    host = room.host
    tokens = _whole(item.tokens, host)
    if host.why:
        whys.add("no_worker", host, f"is {host.why}")
    elif item.adapter and item.adapter not in host.adapters:
        whys.add("no_worker", host, f"does not serve the adapter {item.adapter!r}")
    elif not tokens:
        whys.add("no_worker", host, f"has blocks of {host.block_size} tokens")
    elif host.context_tokens and item.context_tokens > host.context_tokens:
        whys.add("no_worker", host, f"has a context of {host.context_tokens} tokens")
    elif host.capacity_tokens and tokens + 1 > EVICTION_FILL * host.capacity_tokens:
        whys.add("no_worker", host, f"has room for {host.capacity_tokens} tokens in all")
    else:
        tier = _tier(item, room, tokens)
        if tier is not None:
            return _take(item, room, tokens, tier, state)
        if room.free >= tokens:
            whys.add("skip_worth", host, "would evict what is reused more often")
        else:
            whys.add("skip_capacity", host, f"has no room left for {tokens} tokens")
    return None


def _take(item: Wanted, room: _Room, tokens: int, tier: Tier, state: _State) -> Placement:
    """Book a copy, as far as the budget goes."""
    host = room.host
    held = item.held.get(host.id)
    missing = tokens - (0 if held is None else min(tokens, held.tokens))
    if missing > state.left:
        reason = f"{missing} tokens, {int(state.left)} are left of the budget"
        return _placement(item, host, tier, "skip_budget", reason, missing)
    state.left -= missing
    if tier == "gpu":
        room.take(tokens)
    else:
        room.cpu_free -= tokens
    return _placement(item, host, tier, "warm", "", missing)


def _tier(item: Wanted, room: _Room, tokens: int) -> Tier | None:
    """Return where there is room for it that costs nobody more than it gains."""
    free = room.free_tokens(item)
    if free >= tokens:
        return "gpu"
    # Kept below, it only passes through the device: what this plan put there may make way.
    if room.cpu_free >= tokens and free + room.taken >= tokens:
        model = room.host.model
        if model is None:
            return "cpu"
        restore_s = tokens / model.restore_cpu_tokens_per_s + MANAGEMENT_S
        if prefill_s(model, tokens, tokens) > restore_s:
            return "cpu"
    return None


def _nowhere(item: Wanted, whys: _Whys) -> Placement:
    action, reason = whys.action, str(whys)
    if action is None:
        action = "no_worker"
        reason = "there is no other worker" if item.copies > 1 else "the pool has no worker"
    return Placement(item.id, None, "gpu", item.tokens, None, None, None, action, reason)


def _held(item: Wanted, room: _Room) -> Placement:
    host, held = room.host, item.held[room.host.id]
    if held.tier == "gpu":
        room.take(_whole(item.tokens, host))
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
