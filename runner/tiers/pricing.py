"""What restoring some blocks costs and what computing them would.

Within a run of blocks on one tier the gain grows faster than the run, since later tokens attend to
more: the best place to cut lies at the end of a run, so only those are priced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runner.tiers.decision import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from runner.tiers.step_model import StepModel
    from runner.tiers.transfer_model import TransferModel
    from runner.tiers.types import TierName

# Prices per block are computed anew after so many steps and transfers; at first after each.
_REFRESH = 64

# One for each sixteen blocks of depth: a context of a million tokens.
_MAX_PRICES = 4096

# Weight of the newest observation in what is neither transfer nor compute.
_NEWEST_SHARE = 0.1

# A block comes back as part of a prefix: so many share the latency of one read.
TYPICAL_BLOCKS = 16

# Handing one run to the transfer threads, until measured.
_START_SUBMIT_S = 100e-6

# From the last byte to the step that uses it, until measured.
_START_TURN_S = 200e-6


@dataclass(frozen=True, slots=True)
class Offer:
    """Leading blocks up to one place, with their price in seconds; ``GainDecision`` has the words.

    The gain is ``weight * delivered * recompute - restore - management``.
    """

    all_runs: Sequence[Run]
    num_runs: int
    source: str
    num_blocks: int
    recompute_s: float
    restore_s: float
    restore_p90_s: float
    management_s: float
    delivered: float
    gain_s: float

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs up to the cut."""
        return tuple(self.all_runs[: self.num_runs])


@dataclass(slots=True)
class Overhead:
    """Moving averages of what a load costs beside its transfers.

    Looking up is not among it: when a decision is made, that has been paid.

    Attributes:
        submit_s: Handing one run to the transfer threads.
        turn_s: From the last byte to the step that uses the blocks.
    """

    submit_s: float = _START_SUBMIT_S
    turn_s: float = _START_TURN_S

    def observe_submit(self, num_runs: int, elapsed_s: float) -> None:
        """Learn from the start of one load."""
        if num_runs > 0 and elapsed_s >= 0:
            self.submit_s += _NEWEST_SHARE * (elapsed_s / num_runs - self.submit_s)

    def observe_turn(self, elapsed_s: float) -> None:
        """Learn from how long a finished load lay before the engine saw it."""
        if elapsed_s >= 0:
            self.turn_s += _NEWEST_SHARE * (elapsed_s - self.turn_s)

    def expect_s(self, num_runs: int) -> float:
        """Return what a load of so many runs costs beside its transfers."""
        return self.turn_s + num_runs * self.submit_s


@dataclass(slots=True)
class Pricing:
    """Prices loads with what has been measured. Owned by the engine thread.

    Attributes:
        steps: What computing costs.
        transfers: What moving costs.
        block_tokens: Tokens of a block.
        block_bytes: Bytes of a block.
        chunk_tokens: Most tokens of a step.
        overhead: What else a load costs.
    """

    steps: StepModel
    transfers: TransferModel
    block_tokens: int
    block_bytes: int
    chunk_tokens: int
    overhead: Overhead = field(default_factory=Overhead)
    _prices: dict[tuple[str, TierName | int], float] = field(default_factory=dict)
    _seen_at: int = 0

    def recompute_s(self, start_tokens: int, num_blocks: int) -> float:
        """Return what computing blocks after ``start_tokens`` would cost."""
        return self.steps.recompute_s(
            start_tokens, num_blocks * self.block_tokens, self.chunk_tokens
        )

    def restore_s(self, run: Run, source: str = "") -> float:
        """Return what reading one run takes with nothing before it."""
        num_bytes = run.num_blocks * self.block_bytes
        return self.transfers.expect_s(run.tier, "read", num_bytes, source=source)

    def saved_per_block_s(self, tier: TierName, depth: int) -> float:
        """Return what a block of an idle tier saves when it is read back among its neighbours.

        Cheap enough to be asked for every block: remembered for a while, like the two below.

        Args:
            tier: Where it lies.
            depth: Blocks before it.
        """
        cost_s = self._remembered(("read", tier), lambda: self._read_s(tier))
        return self.recompute_per_block_s(depth) - cost_s / TYPICAL_BLOCKS

    def recompute_per_block_s(self, depth: int) -> float:
        """Return what computing a block among its neighbours costs."""
        first = depth // TYPICAL_BLOCKS * TYPICAL_BLOCKS
        return self._remembered(
            ("step", first),
            lambda: self.recompute_s(first * self.block_tokens, TYPICAL_BLOCKS) / TYPICAL_BLOCKS,
        )

    def write_per_block_s(self, tier: TierName, queued_bytes: int) -> tuple[float, float]:
        """Return what writing a block among its neighbours takes, and the queue before it."""
        write_s = self._remembered(("write", tier), lambda: self._write_s(tier, 0))
        block_s = self._remembered(
            ("queue", tier), lambda: self._write_s(tier, self.block_bytes) - self._write_s(tier, 0)
        )
        return write_s / TYPICAL_BLOCKS, block_s * queued_bytes / self.block_bytes

    def _read_s(self, tier: TierName) -> float:
        return self.restore_s(Run(tier, TYPICAL_BLOCKS)) + self.overhead.expect_s(1)

    def _write_s(self, tier: TierName, queued_bytes: int) -> float:
        num_bytes = TYPICAL_BLOCKS * self.block_bytes
        return self.transfers.expect_s(tier, "write", num_bytes, queued_bytes)

    def _remembered(self, key: tuple[str, TierName | int], price: Callable[[], float]) -> float:
        """Return a price that is at most ``_REFRESH`` observations old."""
        num_seen = self.steps.count + self.transfers.num_observed
        if num_seen - self._seen_at >= min(_REFRESH, 1 + self._seen_at):
            self._prices.clear()
            self._seen_at = num_seen
        known = self._prices.get(key)
        if known is None:
            if len(self._prices) >= _MAX_PRICES:
                self._prices.clear()
            known = self._prices[key] = price()
        return known

    def offers(
        self,
        runs: Sequence[Run],
        start_tokens: int,
        weight: float,
        queued: Mapping[TierName, int],
        delivered: Callable[[TierName], float],
        source: str = "",
    ) -> Iterator[Offer]:
        """Yield the price of every cut at the end of a run, nearest first.

        Tiers are read beside one another, the runs of one tier one after the other, behind what
        was asked of it before.

        Args:
            runs: In order.
            start_tokens: Tokens before them.
            weight: What a second of compute is worth.
            queued: Bytes waiting to be read, by tier.
            delivered: Share of blocks expected to arrive from a tier.
            source: The peer they come from.
        """
        num_blocks, arriving = 0, 1.0
        busy_s: dict[TierName, float] = {}
        tails: dict[TierName, float] = {}
        for place, run in enumerate(runs, 1):
            num_bytes = run.num_blocks * self.block_bytes
            before = 0
            if run.tier not in busy_s:
                before = queued.get(run.tier, 0)
                arriving *= delivered(run.tier)
                tails[run.tier] = self.transfers.tail(run.tier, "read", source)
            run_s = self.transfers.expect_s(run.tier, "read", num_bytes, before, source)
            busy_s[run.tier] = busy_s.get(run.tier, 0.0) + run_s
            num_blocks += run.num_blocks
            recompute_s = self.recompute_s(start_tokens, num_blocks)
            restore_s = max(busy_s.values())
            management_s = self.overhead.expect_s(place)
            yield Offer(
                all_runs=runs,
                num_runs=place,
                source=source,
                num_blocks=num_blocks,
                recompute_s=recompute_s,
                restore_s=restore_s,
                restore_p90_s=max(tails[tier] * wait_s for tier, wait_s in busy_s.items()),
                management_s=management_s,
                delivered=arriving,
                gain_s=weight * arriving * recompute_s - restore_s - management_s,
            )


def cut(runs: Sequence[Run], max_blocks: int) -> tuple[Run, ...]:
    """Return the leading ``max_blocks`` blocks, neighbouring runs of one tier as one."""
    kept: list[Run] = []
    for run in runs:
        num_blocks = min(run.num_blocks, max_blocks)
        if num_blocks < 1:
            break
        max_blocks -= num_blocks
        if kept and kept[-1].tier == run.tier:
            num_blocks += kept.pop().num_blocks
        kept.append(Run(run.tier, num_blocks))
    return tuple(kept)
