"""What a tier of a given size saves under several eviction rules, on recorded traffic.

    python -m bench.eviction --traces DIR [--only NAME ...] [--gib N ...] [--csv FILE]

One runner with one lower tier and no pool worth mentioning; an 8B model's arithmetic: prefill of
30 us a token plus attention, 128 KiB of KV a token. For every request the leading blocks that the
tier holds are restored; saved is the share of all prefill seconds. LRU gives up a prompt's rear
first, as the pool does. The order of decisions is all that is measured; nothing is computed.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gateway.replay.traces import Request, read_trace
from runner.tiers.admission import NEARLY_FULL, SECOND_TOUCH
from runner.tiers.gdsf import EvictionOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GIB = 1 << 30
KV_BYTES_PER_TOKEN = 131_072
# 8k tokens in 281 ms, 32k in 1.55 s, 128k in 12.9 s.
TOKEN_S, ATTENDED_S = 30e-6, 1.06e-9
DECODE_TOKEN_S = 0.02
TIERS = {"PCIe": (55e9, 1e-3), "NVMe": (7e9, 1e-3)}
SIZES_GIB = (8, 31, 94, 376)
# What a runner remembers of blocks it has seen, in blocks of a trace.
MAX_SEEN = 200_000


def prefill_s(start: int, tokens: int) -> float:
    return TOKEN_S * tokens + ATTENDED_S * tokens * (start + tokens / 2)


class Order(Protocol):
    """Which block goes next."""

    def __len__(self) -> int: ...

    def __contains__(self, key: bytes) -> bool: ...

    def add(self, key: bytes, parent: bytes, depth: int, *, touches: int) -> None: ...

    def touch_all(self, keys: Sequence[bytes]) -> None: ...

    def settle(self, keys: Sequence[bytes]) -> None:
        """A prompt's blocks have been added."""
        ...

    def pop_victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None: ...


class Lru:
    """The least recently used goes; a prompt's rear before its front."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes, parent: bytes, depth: int, *, touches: int) -> None:
        del parent, depth, touches
        self._keys[key] = None

    def touch_all(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)

    settle = touch_all

    def pop_victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        for key in self._keys:
            if not is_pinned(key):
                del self._keys[key]
                return key
        return None


class Gdsf(EvictionOrder):
    def touch_all(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.touch(key)

    def settle(self, keys: Sequence[bytes]) -> None:
        """The order does not depend on when a block was added."""


@dataclass(frozen=True)
class Rule:
    """An eviction order, and above which fullness a block has to have been asked for twice."""

    name: str
    depth: bool | None
    second_touch_above: float = 1.0

    def order(self, tier: str, block_tokens: int) -> Order:
        if self.depth is None:
            return Lru()
        rate, _ = TIERS[tier]
        restore_s = block_tokens * KV_BYTES_PER_TOKEN / rate
        depth_counts = self.depth

        def saved_s(depth: int) -> float:
            return prefill_s(depth * block_tokens * depth_counts, block_tokens) - restore_s

        return Gdsf(saved_s)


RULES = (
    Rule("LRU", None),
    Rule("GDSF without depth", False),
    Rule("GDSF", True),
    Rule("LRU + 2nd touch", None, -1.0),
    Rule("GDSF + 2nd touch", True, -1.0),
    Rule("GDSF + 2nd touch when full", True, NEARLY_FULL),
)


@dataclass
class Result:
    saved_s: float = 0.0
    prefill_s: float = 0.0
    writes: int = 0
    hit_tokens: int = 0
    tokens: int = 0


@dataclass
class Tier:
    order: Order
    capacity: int
    rule: Rule
    seen: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def serve(self, request: Request, block_tokens: int, tier: str, result: Result) -> None:
        blocks = request.blocks
        held = 0
        while held < len(blocks) and blocks[held] in self.order:
            held += 1
        tokens = min(held * block_tokens, request.prompt_tokens - 1)
        rate, latency_s = TIERS[tier]
        gain_s = prefill_s(0, tokens) - latency_s - tokens * KV_BYTES_PER_TOKEN / rate
        if tokens and gain_s > 0:
            result.saved_s += gain_s
            result.hit_tokens += tokens
        result.prefill_s += prefill_s(0, request.prompt_tokens)
        result.tokens += request.prompt_tokens
        self.order.touch_all(blocks)
        self._store(blocks, result)

    def _store(self, blocks: Sequence[bytes], result: Result) -> None:
        prompt = set(blocks)
        for depth, key in enumerate(blocks):
            touches = self.seen.get(key, 0) + 1
            self.seen[key] = touches
            self.seen.move_to_end(key)
            is_full = len(self.order) > self.rule.second_touch_above * self.capacity
            if key in self.order or (is_full and touches < SECOND_TOUCH):
                continue
            if (
                len(self.order) >= self.capacity
                and self.order.pop_victim(prompt.__contains__) is None
            ):
                break
            self.order.add(key, blocks[depth - 1] if depth else b"", depth, touches=touches)
            result.writes += 1
        self.order.settle(blocks)
        while len(self.seen) > MAX_SEEN:
            self.seen.popitem(last=False)


def in_order(requests: Sequence[Request]) -> Iterator[Request]:
    """Yield requests as they come; one with a parent follows its answer by the think time."""
    children: dict[int, list[Request]] = {}
    ready: list[tuple[float, int, Request]] = []
    for request in requests:
        if request.parent is None:
            heapq.heappush(ready, (request.arrival_s, request.row, request))
        else:
            children.setdefault(request.parent, []).append(request)
    while ready:
        now_s, _, request = heapq.heappop(ready)
        yield request
        end_s = now_s + prefill_s(0, request.prompt_tokens) / 4
        end_s += request.output_tokens * DECODE_TOKEN_S
        for child in children.pop(request.row, ()):
            heapq.heappush(ready, (end_s + child.think_s, child.row, child))


def run(requests: Sequence[Request], block_tokens: int, tier: str, gib: int, rule: Rule) -> Result:
    capacity = gib * GIB // (block_tokens * KV_BYTES_PER_TOKEN)
    store = Tier(rule.order(tier, block_tokens), capacity, rule)
    result = Result()
    for request in requests:
        store.serve(request, block_tokens, tier, result)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of .jsonl.gz traces")
    parser.add_argument("--only", nargs="*", help="names of traces, without ending")
    parser.add_argument("--gib", nargs="*", type=int, default=SIZES_GIB, help="tier sizes")
    parser.add_argument("--csv", type=Path, help="write every cell here")
    options = parser.parse_args()
    rows = []
    for path in sorted(options.traces.glob("*.jsonl.gz")):
        trace = read_trace(str(path))
        if options.only and trace.name not in options.only:
            continue
        requests = list(in_order(trace.requests))
        print(f"\n### {trace.name}: {len(requests)} requests\n")
        print(f"| tier | {' | '.join(rule.name for rule in RULES)} |")
        print(f"|---|{'---:|' * len(RULES)}")
        for tier in TIERS:
            for gib in options.gib:
                cells = [run(requests, trace.block_tokens, tier, gib, rule) for rule in RULES]
                shares = [100 * cell.saved_s / cell.prefill_s for cell in cells]
                texts = [
                    f"{share:.1f} ({cell.writes / 1000:.0f}k)"
                    for share, cell in zip(shares, cells, strict=True)
                ]
                print(f"| {tier}, {gib} GiB | {' | '.join(texts)} |", flush=True)
                rows += [
                    (trace.name, tier, gib, rule.name, share, cell.writes, cell.hit_tokens)
                    for rule, share, cell in zip(RULES, shares, cells, strict=True)
                ]
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("trace", "tier", "gib", "rule", "saved_percent", "writes", "hits"))
            writer.writerows(rows)
    print("\nPercent of prefill seconds saved (thousand blocks written).", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
