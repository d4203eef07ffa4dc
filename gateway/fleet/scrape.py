"""What the gateway reads from a worker's ``/metrics``: capacity, epoch, queue, KV figures.

Only lines of the names below are parsed; an engine may export thousands of others.
Names checked against vLLM 0.32, SGLang 0.5.23 and the bundled runner.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# The contract's names that a worker may export itself; the gateway republishes them per worker.
WORKER_VALUES = (
    "kv_cache_gpu_usage_bytes",
    "kv_cache_cpu_usage_bytes",
    "kv_cache_offload_read_latency",
    "kv_cache_offload_write_latency",
    "kv_cache_eviction_count",
    "gpu_stall_due_to_kv_restore",
)
_NAMES = (
    "process_start_time_seconds",
    "vllm:cache_config_info",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    *WORKER_VALUES,
)
_SAMPLE = re.compile(
    r"^(?P<name>" + "|".join(map(re.escape, _NAMES)) + r")"
    r"(?:\{(?P<labels>[^}]*)\})?[ \t]+(?P<value>\S+)",
    re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class Scrape:
    """One reading; None means the worker does not say.

    Attributes:
        epoch: When the worker's process started, seconds since 1970.
        block_size: Tokens of one KV block.
        capacity_tokens: What its device pool holds.
        running: Requests being computed, all ranks together.
        waiting: Requests queued in the engine.
        values: The contract's figures that the worker reports itself.
        kv_dtype: Type of its KV; empty if it does not say.
    """

    epoch: float | None = None
    block_size: int | None = None
    capacity_tokens: int | None = None
    running: float | None = None
    waiting: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    kv_dtype: str = ""


def parse(text: str) -> Scrape:
    """Read what is there; unparsable values and unknown names are passed over."""
    scrape = Scrape()
    for match in _SAMPLE.finditer(text):
        try:
            value = float(match["value"])
        except ValueError:
            continue
        _take(scrape, match["name"], match["labels"] or "", value)
    return scrape


def _take(scrape: Scrape, name: str, labels: str, value: float) -> None:
    if name == "process_start_time_seconds":
        scrape.epoch = value
    elif name == "vllm:cache_config_info":
        config = dict(_LABEL.findall(labels))
        scrape.kv_dtype = config.get("cache_dtype", "")
        block_size, blocks = config.get("block_size", ""), config.get("num_gpu_blocks", "")
        if block_size.isdigit() and int(block_size) > 0:
            scrape.block_size = int(block_size)
            if blocks.isdigit():
                scrape.capacity_tokens = int(block_size) * int(blocks)
    elif name in ("vllm:num_requests_running", "sglang:num_running_reqs"):
        scrape.running = (scrape.running or 0.0) + value
    elif name in ("vllm:num_requests_waiting", "sglang:num_queue_reqs"):
        scrape.waiting = (scrape.waiting or 0.0) + value
    else:
        scrape.values[name] = value
