"""The tiers beneath one engine's pool: what they hold, what to load, what to store.

The engine thread decides everything here; transfer threads only move bytes. A call of this class
does no payload copy, no file and no socket I/O. Made by ``build_tiers``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from runner.leases import LoanedBlock
from runner.tiers.storer import PIN_DEADLINE_S
from runner.tiers.types import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prefix_index.events import Event
    from runner.kvkeys import KvKey
    from runner.tiers.admission import Admission
    from runner.tiers.announce import Announcer
    from runner.tiers.finder import Finder
    from runner.tiers.gain import Gain
    from runner.tiers.host import HostStore
    from runner.tiers.loader import Loader
    from runner.tiers.past import Past
    from runner.tiers.peer import PeerStore
    from runner.tiers.probes import Probes
    from runner.tiers.storer import Storer
    from runner.tiers.tier import Tier
    from runner.tiers.transfers import Acks, Lane
    from runner.tiers.types import (
        Committed,
        LoadDone,
        LoadPlan,
        LoadQuery,
        TierName,
        TierStats,
    )

_log = logging.getLogger(__name__)

# What is staged when the engine stops is still written if that takes no longer: the next process
# finds the last prompts too. Orchestrators give 30 s from the signal to the kill.
DRAIN_S = 2.0
# A thread that is still busy then is left behind; it is a daemon, and its store stays open.
JOIN_S = 5.0
# Between two looks at what is being drained.
_DRAIN_STEP_S = 0.005


@dataclass(frozen=True, slots=True)
class Parts:
    """What ``build_tiers`` puts together.

    Attributes:
        tiers: By name, in the order they are asked.
        lanes: Every queue.
        host: The cpu tier's bytes; None without that tier.
        peers: Other runners; None without.
    """

    tiers: dict[TierName, Tier]
    lanes: list[Lane]
    acks: Acks
    finder: Finder
    loader: Loader
    storer: Storer
    probes: Probes
    gain: Gain
    admission: Admission
    past: Past
    announcer: Announcer
    host: HostStore | None
    peers: PeerStore | None
    block_bytes: int
    clock: Callable[[], float]
    sleep: Callable[[float], None]


class TierManager:
    """``Tiers`` of one engine; engine thread only, but for the lending of host memory.

    Attributes:
        peers: Figures of the pulls from other runners, from any thread; None without peers.
    """

    def __init__(self, parts: Parts) -> None:
        """Use ``build_tiers``."""
        self.peers = parts.peers
        self._parts = parts
        self._tiers = parts.tiers
        self._loader = parts.loader
        self._storer = parts.storer
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether transfers are under way whose end the engine waits for.

        A store that has not come back for ever so long is not waited for.
        """
        if self._loader.num_open:
            return True
        now_s = self._parts.clock()
        return self._storer.num_open > 0 and all(
            lane.oldest_s(now_s) < PIN_DEADLINE_S for lane in self._parts.lanes
        )

    def consider(self, query: LoadQuery, now_s: float) -> LoadPlan | Literal["pending"] | None:
        """Say what to load for a waiting request; see ``Tiers.consider``."""
        if self._parts.finder.is_waiting(query, now_s):
            return "pending"
        return self._loader.consider(query, now_s)

    def start(self, plan: LoadPlan, blocks: Sequence[int]) -> None:
        """Begin a load into blocks reserved for it, one per planned block.

        Raises:
            ValueError: If the plan is not the latest of its request, or the blocks do not fit it.
        """
        self._loader.start(plan, blocks)

    def cancel(self, owner: str) -> None:
        """Forget a request's look-ups and end its load soon; its ``LoadDone`` still comes."""
        for tier in self._tiers.values():
            if tier.index is not None:
                tier.index.forget(owner)
        self._loader.cancel(owner)

    def poll(self, now_s: float) -> list[LoadDone]:
        """Take in what the transfer threads have done; returns the loads that have ended."""
        self._parts.acks.settle_all()
        for lane in self._parts.lanes:
            lane.revive()
        for tier in self._tiers.values():
            if tier.leases is not None:
                for lease in tier.leases.sweep(now_s):
                    _log.error(
                        "tier %s: %s forgot a pin (%s)", tier.name, lease.owner, lease.reason
                    )
        done = self._loader.poll(now_s)
        self._storer.flush(now_s)
        self._parts.probes.start_due(now_s)
        return done

    def offer(self, blocks: Sequence[Committed], now_s: float) -> None:
        """Consider blocks for storing that have become findable in the pool or were hit there."""
        # What was copied during the step that computed these has given its pins back.
        self._parts.acks.settle_all()
        self._storer.offer(blocks, now_s)

    def touch(self, keys: Sequence[KvKey], now_s: float) -> None:
        """Note the use of a prompt's keys, its first block first."""
        self._parts.past.touched(keys)
        self._parts.admission.history.touched(keys)
        for tier in self._tiers.values():
            if tier.books is not None:
                for key in keys:
                    tier.books.touch(key)

    def observe_step(
        self, num_tokens: int, attended_tokens: int, decode_rows: int, elapsed_s: float
    ) -> None:
        """Learn from one step of the engine; see ``Tiers.observe_step``."""
        if self._loader.was_step_held():
            # It says what the copy took, not what computing does.
            return
        self._parts.gain.pricing.steps.observe(num_tokens, attended_tokens, decode_rows, elapsed_s)

    def why_missing(self, owner: str, key: KvKey) -> Literal["cold", "evicted", "gated", "failed"]:
        """Say why a block that a request would have used was not loaded."""
        if self._loader.has_failed(owner, key):
            return "failed"
        if self._parts.finder.knows(key, self._parts.clock()):
            return "gated"
        return "evicted" if self._parts.past.was_evicted(key) else "cold"

    def pin_cpu(self, keys: Sequence[KvKey], owner: str, deadline_s: float) -> list[LoanedBlock]:
        """Pin the leading ones of some blocks that are in host memory, until the deadline."""
        cpu, host = self._tiers.get("cpu"), self._parts.host
        if cpu is None or cpu.books is None or cpu.leases is None or host is None:
            return []
        lent: list[LoanedBlock] = []
        slots: list[int] = []
        for key in keys:
            entry = cpu.books.get(key)
            if entry is None:
                break
            slots.append(entry.slot)
            place = Place(entry.record, entry.slot)
            lent.append(LoanedBlock(entry.record, partial(host.copy_out, place)))
        if slots:
            cpu.leases.take(_lender(owner), "peer", deadline_s, slots)
        return lent

    def unpin_cpu(self, owner: str) -> None:
        """End what ``pin_cpu`` gave an owner, and forget what was found damaged."""
        cpu, host = self._tiers.get("cpu"), self._parts.host
        if cpu is None or cpu.leases is None or host is None:
            return
        cpu.leases.release_owner(_lender(owner))
        for place in host.drain_damaged():
            cpu.lose(place, "damaged", self._parts.clock())

    def drain_events(self) -> list[Event]:
        """Return the KV events since the last call, in order."""
        return self._parts.announcer.drain()

    def stats(self) -> list[TierStats]:
        """Return the figures of every tier."""
        now_s = self._parts.clock()
        return [tier.stats(self._parts.block_bytes, now_s) for tier in self._tiers.values()]

    def decisions(self) -> list[dict[str, Any]]:
        """Return the last decisions about loads, oldest first."""
        return self._parts.gain.log.rows(self._parts.clock())[::-1]

    def next_wake_s(self, now_s: float) -> float | None:
        """Return in how many seconds to poll though nobody wakes the engine; None for never."""
        times_s = [self._loader.next_deadline_s(), self._parts.gain.next_probe_s()]
        for tier in self._tiers.values():
            if tier.index is not None:
                times_s.append(tier.index.next_deadline_s())
            if tier.leases is not None:
                times_s.append(tier.leases.next_deadline_s())
        return min((max(0.0, at_s - now_s) for at_s in times_s if at_s is not None), default=None)

    def clear(self) -> None:
        """Forget every block of every tier; what the remote tier holds stays there, for others."""
        self._storer.void_all()
        for tier in self._tiers.values():
            if tier.books is not None:
                for entry in list(tier.books):
                    tier.drop(entry)
            if tier.index is not None:
                tier.index.clear()
        self._parts.past.clear()
        self._storer.flush(self._parts.clock())

    def close(self) -> None:
        """Write what is staged, as far as that is quick, then end the threads and the stores."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loader.cancel_all()
        clock = self._parts.clock
        drained_s = clock() + DRAIN_S
        while (self._storer.num_open or self._loader.num_open) and clock() < drained_s:
            self._parts.acks.settle_all()
            self._loader.poll(clock())
            self._storer.flush(clock())
            self._parts.sleep(_DRAIN_STEP_S)
        self._storer.void_all()
        joined_s = clock() + JOIN_S
        have_ended = {lane.name: lane.close(joined_s) for lane in self._parts.lanes}
        if not all(have_ended.values()):
            stuck = [name for name, has_ended in have_ended.items() if not has_ended]
            _log.error("transfers are stuck and left behind: %s", ", ".join(stuck))
            return
        for tier in self._tiers.values():
            if tier.store is not None:
                tier.store.close()
        if self.peers is not None:
            self.peers.close()


def _lender(owner: str) -> str:
    """Return the lease owner of a loan, which no request's id can be."""
    return f"peer:{owner}"
