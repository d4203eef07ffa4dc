"""A simulated engine and tier around the gain model, with a clock that only the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field

from runner.kvkeys import BlockChain
from runner.tiers.decision import GainDecision, Run
from runner.tiers.gain import Gain
from runner.tiers.pricing import Pricing
from runner.tiers.step_model import StepModel
from runner.tiers.transfer_model import TransferModel
from runner.tiers.types import LoadDone, LoadQuery, Outcome, PeerSource, TierName

BLOCK_TOKENS = 16
# A model of 8B parameters: 128 KiB a token.
BLOCK_BYTES = 16 * 131_072
CHUNK_TOKENS = 512


@dataclass
class Speed:
    """How quick a tier really is."""

    bytes_per_s: float
    latency_s: float = 0.0

    def transfer_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass
class Lab:
    """One runner whose prefill takes ``token_s`` a token, and its tiers.

    Attributes:
        token_s: Real seconds per prefilled token.
        speeds: Real speed by tier.
        now_s: The clock.
        noise: Multiplies every real transfer time; called once each.
    """

    token_s: float
    speeds: dict[TierName, Speed]
    block_bytes: int = BLOCK_BYTES
    now_s: float = 1000.0
    queued: dict[TierName, int] = field(default_factory=dict)
    learned_steps: int = 20

    def __post_init__(self) -> None:
        self.steps = StepModel()
        self.transfers = TransferModel()
        self.pricing = Pricing(
            self.steps, self.transfers, BLOCK_TOKENS, self.block_bytes, CHUNK_TOKENS
        )
        own: tuple[TierName, ...] = tuple(tier for tier in self.speeds if tier != "peer")
        self.gain = Gain(self.pricing, own)
        for _ in range(self.learned_steps):
            tokens = CHUNK_TOKENS
            self.steps.observe(tokens, tokens * tokens, 0, tokens * self.token_s)

    def query(
        self,
        num_blocks: int,
        *,
        first_block: int = 0,
        waiting_tokens: int = 0,
        source: PeerSource | None = None,
        owner: str = "r",
    ) -> LoadQuery:
        return LoadQuery(
            owner=owner,
            chain=BlockChain(b"root", BLOCK_TOKENS),
            first_block=first_block,
            max_blocks=first_block + num_blocks,
            prompt_tokens=(first_block + num_blocks) * BLOCK_TOKENS + 1,
            waiting_tokens=waiting_tokens,
            source=source,
        )

    def decide(self, *runs: Run, peer_runs: tuple[Run, ...] = (), **query: object) -> GainDecision:
        num_blocks = max(
            sum(run.num_blocks for run in runs), sum(run.num_blocks for run in peer_runs)
        )
        return self.gain.decide(
            runs,
            self.query(num_blocks, **query),  # type: ignore[arg-type]
            queued=self.queued,
            now_s=self.now_s,
            peer_runs=peer_runs,
        )

    def transfer(self, tier: TierName, num_blocks: int, source: str = "") -> float:
        """Really read blocks; the clock moves on."""
        num_bytes = num_blocks * self.block_bytes
        elapsed_s = self.speeds[tier].transfer_s(num_bytes)
        self.now_s += elapsed_s
        self.transfers.observe(tier, "read", num_bytes, elapsed_s, source)
        return elapsed_s

    def load(
        self, decision: GainDecision, *, outcome: Outcome = "done", num_blocks: int | None = None
    ) -> LoadDone:
        """Really do what was decided, and tell the gain model."""
        if num_blocks is None:
            num_blocks = decision.num_blocks
        elapsed_s = sum(
            self.transfer(run.tier, run.num_blocks, decision.source) for run in decision.runs
        )
        done = LoadDone(decision.id, num_blocks, {}, outcome, elapsed_s)
        self.gain.observe_load(decision, done, self.now_s)
        return done

    def request(self, *runs: Run, **query: object) -> GainDecision:
        """Serve one request: decide, then load or compute."""
        decision = self.decide(*runs, **query)
        if decision.num_blocks:
            self.load(decision)
        else:
            self.now_s += self.token_s * sum(run.num_blocks for run in runs) * BLOCK_TOKENS
        return decision

    def probe(self) -> list[TierName]:
        """Do the probes that are due, one block each."""
        due = self.gain.probes_due(self.now_s)
        for tier in due:
            elapsed_s = self.speeds[tier].transfer_s(self.block_bytes)
            self.now_s += elapsed_s
            self.gain.observe_probe(tier, self.block_bytes, elapsed_s, "done", self.now_s)
        return due


def forced(lab: Lab, num_blocks: int) -> GainDecision:
    """A decision to load from disk, as one taken before the tier turned slow."""
    quick = Lab(lab.token_s, {"disk": Speed(10e9, 100e-6)})
    for _ in range(20):
        quick.transfer("disk", 16)
    return quick.decide(Run("disk", num_blocks))


def ended(num_blocks: int, elapsed_s: float) -> LoadDone:
    """The end of a load that brought ``num_blocks``."""
    return LoadDone(1, num_blocks, {}, "done", elapsed_s)
