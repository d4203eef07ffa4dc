"""One sample of one request while the engine works on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from runner.kvkeys import BlockChain
    from runner.types import EngineRequest, HitSource


class LoadState(Enum):
    """What a sequence has got from the lower tiers since it last held no blocks.

    UNASKED: nothing yet. PENDING: a look-up is under way. LOADING: blocks are on their way.
    SETTLED: all it will get; nobody is asked twice, so that no failing tier is tried for ever.
    """

    UNASKED = "unasked"
    PENDING = "pending"
    LOADING = "loading"
    SETTLED = "settled"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and KV of one sample; before its prefill is done, of all samples of the request.

    Attributes:
        request: What was asked.
        arrival: Order of submission: lower is older.
        indexes: Samples this stands for: all live ones until the prompt is computed, then one.
        tokens: Prompt and completion so far.
        max_tokens: Prompt and completion end here at the latest.
        chain: Keys of the full blocks of ``tokens``.
        rng: Draws this sample's tokens; set when the first one is drawn.
        blocks: Block table.
        num_computed: Leading tokens whose KV is in ``blocks``.
        num_committed: Leading blocks that have been offered to the prefix cache.
        cached_tokens: Prompt tokens found in the cache at first admission; None before it.
        hit_source: The lowest tier they came from.
        load_state: See there.
        owner: Its name towards the tiers; samples of one request have their own.
    """

    request: EngineRequest
    arrival: int
    indexes: list[int]
    tokens: list[int]
    max_tokens: int
    chain: BlockChain
    rng: Random | None = None
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_committed: int = 0
    cached_tokens: int | None = None
    hit_source: HitSource | None = None
    load_state: LoadState = LoadState.UNASKED
    owner: str = field(init=False)

    def __post_init__(self) -> None:
        """Take a name that no other sequence has."""
        self.owner = f"{self.request.id}.{self.indexes[0]}"

    @property
    def order(self) -> tuple[int, int]:
        """Sorts older requests first, then lower samples."""
        return self.arrival, self.indexes[0]

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is to be computed."""
        return self.num_pending == 1 and self.num_computed > 0 and bool(self.blocks)
