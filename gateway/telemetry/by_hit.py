"""Whether a hit really shortens prefill: first tokens by hit share within prompt lengths.

Long prompts hit more and take longer all the same; only prompts of like length can be compared.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.telemetry.factory import Count, Distribution, Factory
    from gateway.telemetry.record import RequestRecord

# Upper bounds in tokens: a question, a conversation, a document, several, and beyond.
_LENGTHS = (512, 2048, 8192, 32768)
PROMPT_LENGTHS = ("lt_512", "lt_2k", "lt_8k", "lt_32k", "ge_32k")
# Percent of the prompt that was cached; nothing at all is a class of its own.
_SHARES = (0.5, 0.9)
HIT_SHARES = ("0", "lt_50", "lt_90", "ge_90")


class ByHit:
    """Counts finished requests whose hit and first token were observed; event loop only.

    Args:
        make: Makes the families.
        buckets_s: Of both histograms.
    """

    def __init__(self, make: Factory, buckets_s: tuple[float, ...]) -> None:
        labels = ("pool", "prompt_length", "hit_share")
        self._ttft = make.histogram(
            "warmlane_ttft_by_hit_seconds",
            "Time to first token by prompt length and observed hit share",
            buckets_s,
            *labels,
        )
        self._prefill = make.histogram(
            "warmlane_prefill_by_hit_seconds",
            "Time to first token less the time in the gateway, by prompt length and hit share",
            buckets_s,
            *labels,
        )
        self._tokens = make.counter(
            "warmlane_prompt_tokens_by_hit",
            "Prompt tokens of the requests in warmlane_prefill_by_hit_seconds",
            *labels,
        )
        self._bound: dict[tuple[str, str, str], tuple[Distribution, Distribution, Count]] = {}

    def add(self, record: RequestRecord) -> None:
        """Take over one finished request."""
        hit, ttft_s, length = record.observed_hit_tokens, record.ttft_s, record.prompt_tokens
        if hit is None or ttft_s is None or not length:
            return
        key = (record.pool, PROMPT_LENGTHS[bisect_right(_LENGTHS, length)], _hit_share(hit, length))
        bound = self._bound.get(key)
        if bound is None:
            bound = (self._ttft.labels(*key), self._prefill.labels(*key), self._tokens.labels(*key))
            self._bound[key] = bound
        ttft, prefill, tokens = bound
        ttft.observe(ttft_s, record.trace_id)
        prefill.observe(max(0.0, ttft_s - record.queue_s - record.route_s))
        tokens.inc(length)


def _hit_share(hit_tokens: int, prompt_tokens: int) -> str:
    if hit_tokens <= 0:
        return HIT_SHARES[0]
    return HIT_SHARES[1 + bisect_right(_SHARES, hit_tokens / prompt_tokens)]
