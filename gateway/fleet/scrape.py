"""What the gateway reads from a worker's ``/metrics``: capacity, epoch, queue, KV figures.

Only lines of the names below are parsed; an engine may export thousands of others.
Names checked against vLLM 0.32, SGLang 0.5.23, llama.cpp's server and the bundled runner. Both the
Prometheus text format and OpenMetrics are read: suffixes, timestamps and exemplars as well.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# The contract's names that a worker may export itself; the gateway republishes them per worker.
WORKER_VALUES = (
    "kv_cache_gpu_usage_bytes",
    "kv_cache_cpu_usage_bytes",
    "kv_cache_offload_read_latency",
    "kv_cache_offload_write_latency",
    "kv_cache_eviction_count",
    "gpu_stall_due_to_kv_restore",
)
# Share of a worker's KV memory that requests use, 0..1, by engine and its age; of several the first
# one counts: engines export an old name beside the new one for a while.
KV_USAGE_NAMES = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_NAMES = (
    "process_start_time_seconds",
    "vllm:cache_config_info",
    *_RUNNING,
    *_WAITING,
    *KV_USAGE_NAMES,
    *WORKER_VALUES,
)
# A quoted label value may hold braces; it never goes past its line. Nothing is tried twice
# (``++``), so that a hostile text costs no more than another one.
_SAMPLE = re.compile(
    r"^[ \t]*(?P<name>" + "|".join(map(re.escape, _NAMES)) + r")(?:_total)?"
    r'(?:[ \t]*\{(?P<labels>(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+)\})?[ \t]+(?P<value>[^\s_]+)',
    re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)[ \t]*=[ \t]*"((?:[^"\\\n]|\\.)*)"')
# By these names an engine tells its data-parallel ranks apart.
_RANK_LABELS = ("engine", "dp_rank")
# Searched in one go: about a millisecond of the event loop.
_CHUNK_BYTES = 32 << 10


@dataclass(slots=True)
class Scrape:
    """One reading; None means the worker does not say.

    Attributes:
        epoch: When the worker's process started, seconds since 1970.
        block_size: Tokens of one KV block.
        capacity_tokens: What its device pool holds.
        running: Requests being computed, all ranks together.
        waiting: Requests queued in the engine, all ranks together.
        kv_usage: Share of its KV memory that requests use, 0..1, mean of its ranks.
        values: The contract's figures that the worker reports itself.
        kv_dtype: Type of its KV; empty if it does not say.
        by_rank: (figure, rank) -> running, waiting and kv_usage of each rank, as far as told.
    """

    epoch: float | None = None
    block_size: int | None = None
    capacity_tokens: int | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    kv_dtype: str = ""
    by_rank: dict[tuple[str, str], float] = field(default_factory=dict)

    def of_rank(self, figure: str, rank: int | None) -> float | None:
        """Return ``running``, ``waiting`` or ``kv_usage`` of one rank; None = of the address."""
        if rank is not None:
            return self.by_rank.get((figure, str(rank)))
        value: float | None = getattr(self, figure)
        return value


class _Reading:
    """A scrape in the making; lines may come in pieces."""

    def __init__(self) -> None:
        self.scrape = Scrape()
        # Name -> rank -> usage.
        self._usages: dict[str, dict[str, float]] = {}

    def add(self, text: str) -> None:
        for match in _SAMPLE.finditer(text):
            try:
                value = float(match["value"])
            except ValueError:
                continue
            # An engine that does not know says NaN.
            if isfinite(value):
                self._take(match["name"], dict(_LABEL.findall(match["labels"] or "")), value)

    def done(self) -> Scrape:
        for name in KV_USAGE_NAMES:
            ranks = self._usages.get(name)
            if ranks:
                self.scrape.kv_usage = sum(ranks.values()) / len(ranks)
                for rank, usage in ranks.items():
                    self.scrape.by_rank["kv_usage", rank] = usage
                break
        return self.scrape

    def _take(self, name: str, labels: dict[str, str], value: float) -> None:
        scrape = self.scrape
        if name == "process_start_time_seconds":
            scrape.epoch = value
        elif name == "vllm:cache_config_info":
            _take_config(scrape, labels)
        elif name in _RUNNING:
            scrape.running = (scrape.running or 0.0) + value
            self._add_rank("running", labels, value)
        elif name in _WAITING:
            scrape.waiting = (scrape.waiting or 0.0) + value
            self._add_rank("waiting", labels, value)
        elif name in KV_USAGE_NAMES:
            # Anything else is no share: better unknown than wrong.
            if 0.0 <= value <= 1.0:
                self._usages.setdefault(name, {})[_rank(labels)] = value
        else:
            scrape.values[name] = value

    def _add_rank(self, figure: str, labels: dict[str, str], value: float) -> None:
        by_rank, key = self.scrape.by_rank, (figure, _rank(labels))
        by_rank[key] = by_rank.get(key, 0.0) + value


def parse(text: str) -> Scrape:
    """Read what is there; unparsable values and unknown names are passed over."""
    reading = _Reading()
    reading.add(text)
    return reading.done()


async def parse_in_pieces(body: bytes) -> Scrape:
    """Read a body of any size as ``parse`` does, and let others run in between."""
    reading = _Reading()
    for piece in _pieces(body):
        reading.add(piece.decode("utf-8", "replace"))
        await asyncio.sleep(0)
    return reading.done()


def _pieces(body: bytes) -> Iterator[bytes]:
    """Cut between lines; a line longer than a piece is no metric, and is cut anywhere."""
    start = 0
    while start < len(body):
        end = start + _CHUNK_BYTES
        if end < len(body):
            end = body.rfind(b"\n", start, end) + 1 or end
        yield body[start:end]
        start = end


def _rank(labels: dict[str, str]) -> str:
    return next((labels[name] for name in _RANK_LABELS if name in labels), "")


def _take_config(scrape: Scrape, labels: dict[str, str]) -> None:
    scrape.kv_dtype = labels.get("cache_dtype", "")
    block_size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
    if block_size.isdecimal() and int(block_size) > 0:
        scrape.block_size = int(block_size)
        if blocks.isdecimal():
            scrape.capacity_tokens = int(block_size) * int(blocks)
