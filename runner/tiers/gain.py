"""Restore or recompute: decides for every request by what has been measured on this machine.

There is no threshold in tokens. A tier that costs more than computing is refused after a few
losses; only a background probe brings it back, never a user's request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from runner.tiers.decision import GainDecision, Reason, Run
from runner.tiers.decision_log import DecisionLog
from runner.tiers.pricing import Offer, cut
from runner.tiers.trust import Trust

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from runner.tiers.pricing import Pricing
    from runner.tiers.types import LoadDone, LoadQuery, Outcome, TierName

# A gain below the jitter of a step is none.
MIN_GAIN_S = 0.5e-3

# Nor is one below a tenth of what computing costs: the models are not better than that.
MIN_GAIN_SHARE = 0.1

# After a refusal this many times the usual bar, so that a close call does not flap.
REOPEN_FACTOR = 2.0


@dataclass(slots=True)
class Gain:
    """Decides, and remembers who kept its promise. Owned by the engine thread.

    Attributes:
        pricing: What things cost.
        tiers: The runner's own, nearest first; they are probed.
        log: The last decisions.
    """

    pricing: Pricing
    tiers: tuple[TierName, ...]
    log: DecisionLog = field(default_factory=DecisionLog)
    _trust: dict[tuple[TierName, str], Trust] = field(default_factory=dict)
    # Where the last decision was against: it takes more to change it.
    _closed: set[tuple[TierName, str]] = field(default_factory=set)
    _ids: Iterator[int] = field(default_factory=lambda: count(1))

    def decide(
        self,
        runs: Sequence[Run],
        query: LoadQuery,
        *,
        queued: Mapping[TierName, int],
        now_s: float,
        peer_runs: Sequence[Run] = (),
    ) -> GainDecision:
        """Choose how many blocks to restore and from where, and note it in the log.

        Args:
            runs: What the runner's own tiers hold from ``query.first_block`` on, in order.
            query: The request.
            queued: Bytes waiting to be read, by tier.
            now_s: Monotonic.
            peer_runs: What the request's peer holds, from the same block on.
        """
        room = query.max_blocks - query.first_block
        own, peer = cut(runs, room), cut(peer_runs, room)
        url = query.source.url if query.source is not None else ""
        weight = _weight(query.waiting_tokens, self.pricing.chunk_tokens)
        offers = [
            *self._offers(own, "", query, queued, weight),
            *self._offers(peer, url, query, queued, weight),
        ]
        hit_blocks = max(sum(run.num_blocks for run in runs) for runs in (own, peer))
        decision = self._choose(offers, query, weight, hit_blocks)
        self.log.add(decision, query.owner, now_s)
        return decision

    def observe_load(self, decision: GainDecision, done: LoadDone, now_s: float) -> None:
        """Learn from a load's end who was slow and who did not deliver.

        Its transfers' times are to be observed before (``TransferModel.observe``).
        """
        saved_s = self.pricing.recompute_s(decision.start_tokens, done.num_blocks)
        self.log.finish(decision, done, saved_s - done.elapsed_s)
        # A request that went away proves nothing, unless it had waited longer than computing takes.
        is_stopped = done.outcome == "stopped"
        patience_s = decision.recompute_s if is_stopped else saved_s
        lost_s = done.elapsed_s - decision.weight * patience_s
        is_lost = lost_s > MIN_GAIN_S
        for tier, share in _delivered(decision.runs, done.num_blocks).items():
            trust = self._of(tier, decision.source)
            trust.read_at_s = now_s
            if not is_stopped:
                trust.note_delivered(share)
            if not is_lost and share == 1.0:
                trust.won(-lost_s)
        if is_lost:
            self._of(self._slowest(decision), decision.source).lost(lost_s)

    def observe_probe(
        self,
        tier: TierName,
        num_bytes: int,
        elapsed_s: float,
        outcome: Outcome,
        now_s: float,
        source: str = "",
    ) -> None:
        """Learn from a background probe, its transfer included; readmits a tier that recovered."""
        trust = self._of(tier, source)
        trust.read_at_s = now_s
        trust.note_delivered(1.0 if outcome == "done" else 0.0)
        if outcome != "done":
            return
        transfers = self.pricing.transfers
        transfers.observe(tier, "read", num_bytes, elapsed_s, source)
        if not trust.is_refused:
            return
        transfers.believe_latest(tier, "read", source)
        num_blocks = max(1, round(trust.typical_blocks))
        start_tokens = round(trust.typical_start_tokens)
        recompute_s = self.pricing.recompute_s(start_tokens, num_blocks)
        restore_s = self.pricing.restore_s(Run(tier, num_blocks), source)
        if recompute_s - restore_s - self.pricing.overhead.expect_s(1) > _bar_s(recompute_s):
            trust.readmit()
            self._closed.discard((tier, source))

    def is_refused(self, tier: TierName, source: str = "") -> bool:
        """Return whether no request may load from there."""
        trust = self._trust.get((tier, source))
        return trust is not None and trust.is_refused

    def probes_due(self, now_s: float) -> list[TierName]:
        """Return the own tiers to ask for one block now; each once per interval."""
        due = [tier for tier in self.tiers if self._of(tier, "").next_probe_s() <= now_s]
        for tier in due:
            self._of(tier, "").probed_at_s = now_s
        return due

    def peer_probes_due(self, now_s: float) -> list[str]:
        """Return the peers, of those that requests have named, to ask for one block now."""
        due = [
            source
            for (tier, source), trust in self._trust.items()
            if tier == "peer" and trust.next_probe_s() <= now_s
        ]
        for source in due:
            self._of("peer", source).probed_at_s = now_s
        return due

    def next_probe_s(self) -> float | None:
        """Return when the next own tier is to be probed; None without tiers."""
        return min((self._of(tier, "").next_probe_s() for tier in self.tiers), default=None)

    def _offers(
        self,
        runs: Sequence[Run],
        source: str,
        query: LoadQuery,
        queued: Mapping[TierName, int],
        weight: float,
    ) -> Iterator[Offer]:
        """Price the runs up to the first refused tier."""
        start_tokens = query.first_block * self.pricing.block_tokens
        allowed: list[Run] = []
        before_tokens = start_tokens
        for run in runs:
            self._of(run.tier, source).weighed(before_tokens, run.num_blocks)
            if self.is_refused(run.tier, source):
                break
            allowed.append(run)
            before_tokens += run.num_blocks * self.pricing.block_tokens
        return self.pricing.offers(
            allowed,
            start_tokens,
            weight,
            queued,
            lambda tier: self._of(tier, source).delivered,
            source,
        )

    def _choose(
        self, offers: list[Offer], query: LoadQuery, weight: float, hit_blocks: int
    ) -> GainDecision:
        """Return the best offer that clears its bar, else the best there was."""
        best = Offer((), 0, "", 0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
        bar_s = MIN_GAIN_S
        reason: Reason = "refused" if hit_blocks else "nothing_found"
        for place, offer in enumerate(sorted(offers, key=lambda offer: -offer.gain_s)):
            offer_bar_s, verdict = self._judge(offer)
            if not place or verdict == "worth":
                best, bar_s, reason = offer, offer_bar_s, verdict
            if verdict == "worth" or offer.gain_s <= MIN_GAIN_S:
                break
        return GainDecision(
            id=next(self._ids),
            num_blocks=best.num_blocks if reason == "worth" else 0,
            runs=best.runs,
            source=best.source,
            start_tokens=query.first_block * self.pricing.block_tokens,
            num_tokens=best.num_blocks * self.pricing.block_tokens,
            hit_blocks=hit_blocks,
            recompute_s=best.recompute_s,
            restore_s=best.restore_s,
            restore_p90_s=best.restore_p90_s,
            management_s=best.management_s,
            delivered=best.delivered,
            weight=weight,
            gain_s=best.gain_s,
            bar_s=bar_s,
            reason=reason,
        )

    def _judge(self, offer: Offer) -> tuple[float, Reason]:
        """Return the bar and whether the offer clears it; remembers on which side it fell."""
        usual_s = _bar_s(offer.recompute_s)
        place = (offer.runs[-1].tier, offer.source)
        bar_s = usual_s * (REOPEN_FACTOR if place in self._closed else 1.0)
        if offer.gain_s > bar_s:
            self._closed.discard(place)
            return bar_s, "worth"
        if usual_s > MIN_GAIN_S:  # a handful of blocks says nothing about the tier
            self._closed.add(place)
        return bar_s, "close_call" if offer.gain_s > usual_s else "too_little"

    def _slowest(self, decision: GainDecision) -> TierName:
        """Return whose part of a load takes longest by what its transfers have just shown."""
        slowest = max(decision.runs, key=lambda run: self.pricing.restore_s(run, decision.source))
        return slowest.tier

    def _of(self, tier: TierName, source: str) -> Trust:
        return self._trust.setdefault((tier, source), Trust())


def _bar_s(recompute_s: float) -> float:
    return max(MIN_GAIN_S, MIN_GAIN_SHARE * recompute_s)


def _weight(waiting_tokens: int, chunk_tokens: int) -> float:
    """Return what a second of compute is worth: up to twice its length if others wait for it."""
    return 1.0 + waiting_tokens / (waiting_tokens + chunk_tokens)


def _delivered(runs: Sequence[Run], num_blocks: int) -> dict[TierName, float]:
    """Return by tier which share of its blocks came, up to the one that broke off."""
    shares: dict[TierName, float] = {}
    for run in runs:
        came = min(run.num_blocks, num_blocks)
        num_blocks -= came
        shares[run.tier] = min(shares.get(run.tier, 1.0), came / run.num_blocks)
        if came < run.num_blocks:
            break
    return shares
