"""Tries tiers with a block of their own now and then, so that estimates of idle ones stay true."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from runner.tiers.transfers import Job
from runner.tiers.types import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from runner.leases import Lease
    from runner.tiers.gain import Gain
    from runner.tiers.loads import Read
    from runner.tiers.peer import PeerStore
    from runner.tiers.tier import Tier
    from runner.tiers.types import Outcome, TierName

# A block that takes longer is a failure of the tier: no prefix is worth such a wait.
PROBE_TIMEOUT_S = 5.0


class Probes:
    """Reads of one block into memory that nobody else sees; engine thread only.

    Args:
        tiers: By name.
        gain: Says who is due, and learns.
        block_bytes: Of a block.
        peers: Other runners; None without.
        peer_blocks: For each peer a block that it may hold.
        clock: Monotonic.
    """

    def __init__(
        self,
        tiers: dict[TierName, Tier],
        gain: Gain,
        block_bytes: int,
        *,
        peers: PeerStore | None,
        peer_blocks: Mapping[str, Place],
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._gain = gain
        self._block_bytes = block_bytes
        self._peers = peers
        self._peer_blocks = peer_blocks
        self._clock = clock
        self._under_way: set[tuple[TierName, str]] = set()

    def start_due(self, now_s: float) -> None:
        """Begin the probes that are due; one at a time of each tier and peer."""
        for name in self._gain.probes_due(now_s):
            tier = self._tiers[name]
            place = self._place_on(tier, now_s)
            if place is not None and tier.store is not None:
                self._start(tier, "", place, tier.store.read, now_s)
        if self._peers is None:
            return
        for url in self._gain.peer_probes_due(now_s):
            wanted = self._peer_blocks.get(url)
            if wanted is not None:
                read = partial(self._peers.read_from, url)
                self._start(self._tiers["peer"], url, wanted, read, now_s)

    def _place_on(self, tier: Tier, now_s: float) -> Place | None:
        """Return some block that a tier holds."""
        if tier.books is not None:
            entry = next(iter(tier.books), None)
            return None if entry is None else Place(entry.record, entry.slot)
        return None if tier.index is None else tier.index.some_place(now_s)

    def _start(self, tier: Tier, source: str, place: Place, read: Read, now_s: float) -> None:
        if (tier.name, source) in self._under_way:
            return
        self._under_way.add((tier.name, source))
        deadline_s = now_s + PROBE_TIMEOUT_S
        lease = None
        if tier.leases is not None:
            lease = tier.leases.take("probe", "load", deadline_s, [place.slot])
        outcomes: list[Outcome] = []

        def run() -> None:
            scratch = bytearray(self._block_bytes)

            def deliver(index: int, payload: memoryview) -> bool:
                scratch[:] = payload
                return True

            outcomes.append(read([place], deliver, deadline_s))

        settle = partial(self._settle, tier, source, place, lease, outcomes)
        tier.reader.submit(Job(self._block_bytes, run, settle))

    def _settle(
        self,
        tier: Tier,
        source: str,
        place: Place,
        lease: Lease | None,
        outcomes: list[Outcome],
        job: Job,
    ) -> None:
        now_s = self._clock()
        self._under_way.discard((tier.name, source))
        if lease is not None and tier.leases is not None:
            tier.leases.release(lease)
        outcome = outcomes[0] if outcomes else "failed"
        self._gain.observe_probe(
            tier.name, self._block_bytes, job.elapsed_s, outcome, now_s, source
        )
        if source:
            return
        if outcome == "done":
            tier.reading.succeeded()
        elif outcome == "failed":
            tier.reading.failed(now_s, job.error)
        if outcome in ("damaged", "missing", "failed"):
            tier.lose(place, outcome, now_s)
