"""One sample of one request while the engine works on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from runner.kvkeys import BlockChain
    from runner.types import EngineRequest


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
