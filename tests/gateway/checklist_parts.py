"""What a fleet that may go live tells, as the checklist asks for it; tests break it one by one."""

from __future__ import annotations

from typing import Any

from gateway.doctor.checklist.facts import Facts
from gateway.doctor.checklist.names import ALERTS, BARE_METRICS, METRICS

BUCKETS = ("1.0", "5.0", "10.0", "+Inf")


def worker(name: str, **fields: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": name,
        "url": f"http://10.0.0.1/{name}",
        "pool": "chat",
        "mode": "exact",
        "blocks": {"gpu": 40, "cpu": 10},
        "capacity_tokens": 16_384,
        "cpu_capacity_tokens": None,
        "block_size": 16,
        "pool_block_size": 16,
        "parity": 1,
        "adapters": ["law"],
        "fingerprint": "weights/tokenizer/bfloat16",
        "is_apart": False,
        "differences": [],
    }
    return row | fields


def cache(**disk: Any) -> dict[str, Any]:
    tiers: dict[str, Any] = {"gpu": {}, "cpu": {"capacity_bytes": 1000 * 9_216}}
    if disk:
        tiers["disk"] = disk
    return {"block_size": 16, "block_bytes": 9_216, "tiers": tiers}


def disk_test(**fields: Any) -> dict[str, Any]:
    found = {"ok": True, "damaged": 0, "failed_reads": 0, "failed_writes": 0}
    found |= {"blocks_written": 100, "blocks_read": 300, "read_bytes_per_s": 4e8}
    return {"disk": found | fields}


def metrics_text(
    *, cold: tuple[int, ...] = (20, 20, 20, 20), usage: dict[str, float] | None = None
) -> str:
    """Return an exposition text; ``cold`` counts cold prompts up to each of ``BUCKETS``."""
    names = [*METRICS, *BARE_METRICS]
    lines = [f"# TYPE {name} gauge" for name in names if name != "warmlane_ttft_by_hit_seconds"]
    lines += [f'{name}{{scope="fleet",worker=""}} 1.0' for name in BARE_METRICS]
    for name, value in ({"w0": 0.4, "w1": 0.7} if usage is None else usage).items():
        lines.append(f'warmlane_worker_kv_usage_ratio{{pool="chat",worker="{name}"}} {value}')
    family = "warmlane_ttft_by_hit_seconds"
    lines.append(f"# TYPE {family} histogram")
    # Warm prompts are no cold ones, however slow.
    for share, counts in (("0", cold), ("ge_90", (0, 0, 0, 500))):
        labels = f'hit_share="{share}",pool="chat",prompt_length="lt_512"'
        lines += [
            f'{family}_bucket{{{labels},le="{le}"}} {count}'
            for le, count in zip(BUCKETS, counts, strict=True)
        ]
        lines.append(f"{family}_count{{{labels}}} {counts[-1]}")
        lines.append(f"{family}_sum{{{labels}}} {counts[-1] * 0.5}")
    return "\n".join(lines) + "\n"


def cause(name: str, segment: str, tokens_lost: int) -> dict[str, Any]:
    return {
        "cause": name,
        "segment": segment,
        "tokens_lost": tokens_lost,
        "requests": 90,
        "advice": f"Mend {name}.",
    }


def hot(name: str, *tiers: str, tokens: int = 2048, reuses: float = 9.0) -> dict[str, Any]:
    copies = [{"worker": "w0", "tiers": list(tiers)}] if tiers else []
    return {"id": name, "reuses": reuses, "prefix_tokens": tokens, "copies": copies}


def healthy() -> Facts:
    """Return the facts of a fleet of which every line passes."""
    offload = {"max_offload_tokens": 8192, "scope": "knowledge"}
    return Facts(
        [worker("w0"), worker("w1")],
        documents={
            "index": {
                "pools": [
                    {
                        "pool": "chat",
                        "models": ["m"],
                        "reads_prompts": True,
                        "prompt_fingerprint": "0123456789abcdef",
                    }
                ]
            },
            "misses": {"causes": [], "totals": {"requests": 100, "prompt_tokens": 100_000}},
            "worth": {
                "pools": [{"pool": "chat", "requests": 100.0, "reusable_tokens": 20_000}],
                "tenants": [{"tenant": "acme"}],
                "advice": [],
                "hints": [
                    {"pool": "chat", "requests": 100, "with_documents": 90, "with_chunks": 80}
                ],
            },
            "documents": {"documents": [hot("a", "gpu"), hot("b", "cpu")], "warmed": []},
            "config": {
                "settings": {
                    "routing": {"mode": "cost", "share": 100},
                    "pools": [{"name": "chat", "offload": offload}],
                }
            },
        },
        metrics=metrics_text(),
        caches={"w0": cache(num_blocks=5), "w1": cache()},
        selftests={"w0": disk_test()},
        hashes={"chat": {"m": ["a1", "a2"], "law": ["b1", "b2"]}},
        rules=dict.fromkeys(ALERTS, "ok"),
    )
