"""Lines about the memory that KV lies in: seen, large enough, tested, and not filled with waste."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.doctor.checklist.exposition import samples_of
from gateway.doctor.checklist.verdict import Verdict, failed, listed, passed, unknown, warned

if TYPE_CHECKING:
    from gateway.doctor.checklist.facts import Facts

_LOWER = frozenset({"cpu", "disk", "remote"})
# A pool with fewer requests in the fading hour has not shown yet what it reuses.
MIN_REQUESTS = 20.0


def kv_watermark(facts: Facts) -> Verdict:
    """KV watermark visible: every worker says how full its KV memory is."""
    if facts.metrics is None:
        return unknown(facts.why("metrics"), "Let this command reach the gateway's /metrics.")
    told = {
        labels["worker"]: value
        for labels, _, value in samples_of(facts.metrics, "warmlane_worker_kv_usage_ratio")
    }
    silent = [worker["id"] for worker in facts.workers if worker["id"] not in told]
    advice = (
        "Let the gateway reach the engine's /metrics with vllm:kv_cache_usage_perc, "
        "sglang:token_usage or llamacpp:kv_cache_usage_ratio; without it nobody sees memory run "
        "out."
    )
    if not told:
        return failed("no worker says how full its KV memory is", advice)
    evidence = f"highest now {max(told.values()):.0%}"
    if silent:
        return warned(f"{listed(silent)} do not say how full they are; {evidence}", advice)
    return passed(f"{len(told)} of {len(told)} workers say it; {evidence}")


def cpu_tier(facts: Facts) -> Verdict:
    """CPU tier larger than the measured reusable prefix set, in every pool."""
    verdicts = [_cpu_tier(facts, pool) for pool in facts.pools]
    if not verdicts:
        return unknown("there is no worker", "Add workers, then ask again.")
    order = ("fail", "warn", "pass")
    return min(verdicts, key=lambda verdict: order.index(verdict.status))


def _cpu_tier(facts: Facts, pool: str) -> Verdict:
    row = facts.row("worth", "pools", pool)
    reusable = None if row is None else row.get("reusable_tokens")
    if row is None or reusable is None or row["requests"] < MIN_REQUESTS:
        return unknown(
            f"pool {pool} has not shown yet which prefixes it reuses",
            "Send real traffic for some minutes, then ask again.",
        )
    workers = facts.of_pool(pool)
    device = sum(worker["capacity_tokens"] or 0 for worker in workers)
    host = sum(_host_tokens(facts, worker) for worker in workers)
    set_of = f"pool {pool} reuses prefixes of {reusable:,} tokens"
    if host:
        evidence = f"{set_of}; its CPU tier holds {host:,}"
        if host >= reusable:
            return passed(evidence)
        return failed(evidence, "Enlarge it (--host-bytes), or let it keep less (offload caps).")
    if device >= reusable:
        return passed(f"{set_of}; device memory alone holds {device:,}, a CPU tier is not needed")
    evidence = f"{set_of}; device memory holds {device:,} and no CPU tier is known"
    return warned(
        evidence, "Give the workers a CPU tier (runner: --host-bytes) of at least that size."
    )


def _host_tokens(facts: Facts, worker: dict[str, Any]) -> int:
    """Return what a worker's CPU tier can hold; 0 if it has none or says nothing of it."""
    cache = facts.caches.get(worker["id"], {})
    num_bytes = cache.get("tiers", {}).get("cpu", {}).get("capacity_bytes")
    if num_bytes and cache.get("block_bytes"):
        return int(num_bytes // cache["block_bytes"] * cache["block_size"])
    return int(worker["cpu_capacity_tokens"] or 0)


def disk_threads(facts: Facts) -> Verdict:
    """SSD threads stress-tested: written and read at once just now, every byte compared."""
    refused = {name: why for name, why in facts.missing.items() if name.startswith("selftest of ")}
    found = {name: test["disk"] for name, test in facts.selftests.items() if test.get("disk")}
    bad = [name for name, disk in found.items() if not disk["ok"]]
    if bad:
        disk = found[bad[0]]
        return failed(
            f"{listed(bad)}: {disk['damaged']} damaged, {disk['failed_reads']} reads and "
            f"{disk['failed_writes']} writes failed of {disk['blocks_written']} blocks",
            "Take the worker's disk out of use (--ssd-dir) and look at the kernel's log.",
        )
    if refused:
        name, why = next(iter(refused.items()))
        return unknown(f"no {name}: {why}", "Ask again in half a minute.")
    if found:
        slowest = min(disk["read_bytes_per_s"] for disk in found.values())
        blocks = sum(disk["blocks_read"] for disk in found.values())
        return passed(
            f"{len(found)} disks gave back {blocks:,} blocks whole while others were written; the "
            f"slowest reads {slowest / 1e6:,.0f} MB/s"
        )
    silent = [w["id"] for w in facts.workers if w["id"] not in facts.caches and _uses(w, "disk")]
    if silent:
        return unknown(
            f"{listed(silent)} keep KV on disk, and only bundled runners can test that",
            "Test the disk with fio under the engine's own block size and threads.",
        )
    return passed("no worker has a disk tier: nothing to test")


def stable_offload(facts: Facts) -> Verdict:
    """Only stable tokens offloaded: a cap ends what is kept where other prompts can still share."""
    pools = [pool for pool in facts.pools if _lower_tiers(facts, pool)]
    if not pools:
        return passed("no worker keeps KV beneath its device memory: nothing is offloaded")
    config = facts.documents.get("config")
    if config is None:
        return unknown(facts.why("config"), "Ask a gateway of this version.")
    configured = {pool["name"]: pool["offload"] for pool in config["settings"]["pools"]}
    uncapped = [p for p in pools if configured[p]["max_offload_tokens"] is None]
    if uncapped:
        tiers = " and ".join(sorted(_lower_tiers(facts, uncapped[0])))
        return failed(
            f"pool {listed(uncapped)} offloads to {tiers} without a cap: the last turn and what "
            "was generated are written too",
            "Set pools[].offload.max_offload_tokens; of each prompt only stable tokens are kept "
            "then.",
        )
    shown = [
        f"{pool}: at most {configured[pool]['max_offload_tokens']:,} tokens, up to the end of "
        f"{configured[pool]['scope']}"
        for pool in pools
    ]
    return passed("; ".join(shown))


def _lower_tiers(facts: Facts, pool: str) -> set[str]:
    found: set[str] = set()
    for worker in facts.of_pool(pool):
        found |= _LOWER.intersection(facts.caches.get(worker["id"], {}).get("tiers", {}))
        found |= {tier for tier in _LOWER if _uses(worker, tier)}
    return found


def _uses(worker: dict[str, Any], tier: str) -> bool:
    return bool(worker["blocks"].get(tier))
