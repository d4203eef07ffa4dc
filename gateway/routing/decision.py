"""What a choice reads, and what it returns.

Apart from ``gateway/routing/choose.py`` because that is compiled in compiled wheels, and classes of
msgspec cannot be.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from gateway.routing.cost import OUTPUT_ALLOWANCE_TOKENS
from gateway.routing.numbers import Candidate, Estimate, Source
from gateway.routing.prices import Prices, all_hits


class Reason(StrEnum):
    """Why the worker was chosen (bounded: it is a metric label)."""

    NO_CANDIDATE = "no_candidate"
    ONLY_CANDIDATE = "only_candidate"
    LONGEST_PREFIX = "longest_prefix"  # least cost, and nobody holds more of the prompt
    LEAST_COST = "least_cost"  # least cost although another holds more, or nobody anything
    HOME = "home"  # nearly the least cost, and the home of a prompt nobody holds
    SIBLING = "sibling"  # a request with the same cold prefix is being computed there
    UNCALIBRATED = "uncalibrated"  # a candidate's speed is unknown: (u + Qtok) * (n + 1)
    LEAST_LOAD = "least_load"  # routing.mode: least_load, the rule is switched off
    STRICT_HOME = "strict_home"  # affinity: strict, first of the ring
    STRICT_SPILL = "strict_spill"  # affinity: strict, those before it were above the load bound
    NO_TOKENS_HOME = "no_tokens_home"  # prompt or index unreadable, first of the ring
    NO_TOKENS_SPILL = "no_tokens_spill"  # likewise, those before it were above the load bound


class RouteInput(msgspec.Struct):
    """Everything a choice depends on.

    Attributes:
        now_s: Decision time, on the clock of the candidates' times.
        prompt_tokens: Prompt length (``L``), exact or estimated.
        candidates: All workers of the pool, eligible or not.
        mode: ``cost``; ``strict`` and ``text`` go by the ring with bounded load; ``least_load`` by
            requests in flight alone.
        output_tokens: Mean completion length (``E_out``).
        home: The key's home workers in ring order; may be left empty when the prompt is held.
        ring: All workers in ring order from the key on; read by ``strict`` and ``text`` only.
        sources: Who could hand over KV of this prompt to the candidates that can pull.
        draws: Positions of candidates drawn at random; empty = all candidates are compared.
        allowance_tokens: Tokens of KV that the completion will need: no more than it may have.
    """

    now_s: float
    prompt_tokens: int
    candidates: list[Candidate]
    mode: Literal["cost", "strict", "text", "least_load"] = "cost"
    output_tokens: float = 200.0
    home: list[str] = []
    ring: list[str] = []
    sources: list[Source] = []
    draws: list[int] = []
    allowance_tokens: int = OUTPUT_ALLOWANCE_TOKENS


class Decision(msgspec.Struct):
    """The outcome: a worker, why, and what everybody would have cost.

    Attributes:
        worker: Chosen worker id; None when nobody is eligible.
        reason: Why this one.
        source: Where the hit tokens that are not on its device come from, or ``recompute``; as
            ``Estimate.source``.
        hit_tokens: Predicted hit tokens on it, those it pulls included.
        ttft_s: Predicted TTFT on it; None when nothing is calibrated.
        unit: Unit of all costs: ``seconds``, or ``token_requests`` while a speed is unknown.
        tied: Workers that shared the least cost, in the candidates' order.
        input: What was read.
        rotation: Tie breaker that was used.
        cold: Whether pending siblings counted: no eligible worker holds half of the prompt.
        position: Index of the chosen worker among the candidates; -1 when nobody was chosen.
        chosen: Its estimate.
        mode: How its hits are known (the candidate's ``mode``).
    """

    worker: str | None
    reason: Reason
    source: str
    hit_tokens: int
    ttft_s: float | None
    unit: Literal["seconds", "token_requests"]
    tied: list[str]
    input: RouteInput
    rotation: int
    cold: bool = True
    position: int = -1
    chosen: Estimate | None = None
    mode: str = ""

    @property
    def candidates(self) -> list[Estimate]:
        """One estimate per candidate of the input, in its order.

        O(candidates) each time it is asked for: the choice itself prices only the contenders.
        """
        hits = all_hits(self.input.candidates, credited=self.cold)
        return Prices(self.input, hits, in_seconds=self.unit == "seconds").all()

    @property
    def pull_tokens(self) -> int:
        """Tokens that the chosen worker is to fetch from ``source``."""
        return 0 if self.chosen is None else self.chosen.pull_tokens

    def to_json(self) -> bytes:
        """Encode the decision with its whole input and every candidate's estimate."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return msgspec.json.encode(fields | {"candidates": self.candidates})

    @staticmethod
    def from_json(data: bytes) -> Decision:
        """Decode what ``to_json`` wrote; ``choose(it.input, rotation=it.rotation)`` equals it."""
        return msgspec.json.decode(data, type=Decision)

    def estimate(self) -> Estimate:
        """Return the chosen worker's estimate.

        Raises:
            LookupError: If no worker was chosen.
        """
        if self.chosen is None:
            raise LookupError("no worker was chosen")
        return self.chosen
