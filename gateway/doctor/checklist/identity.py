"""Lines about what a cache key is made of: template, tokenizer, model, adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.doctor.checklist.verdict import Verdict, failed, listed, passed, unknown, warned

if TYPE_CHECKING:
    from gateway.doctor.checklist.facts import Facts

_OWN = "Give the pool the worker's own tokenizer and chat template (pools[].tokenizer, .template)."
# Enough to tell two apart at a glance, as git does.
_DIGITS = 12


def template(facts: Facts) -> Verdict:
    """Template versioned and in parity: a worker's tokens are ours, and we can say of which."""
    index = facts.documents.get("index")
    if index is None:
        return unknown(facts.why("index"), "Ask again when the gateway answers /admin/v1/index.")
    unread = [pool["pool"] for pool in index["pools"] if not pool["reads_prompts"]]
    if unread:
        return failed(f"prompts of pool {listed(unread)} are not read at all", _OWN)
    diverged = [worker["id"] for worker in facts.workers if worker["parity"] == 0]
    if diverged:
        return failed(f"tokens of {listed(diverged)} differ from ours", _OWN)
    silent = [worker["id"] for worker in facts.workers if worker["parity"] != 1]
    if silent or not facts.workers:
        return unknown(
            f"{listed(silent) or 'no worker'} did not say how it reads the probes",
            "Send it a request, or switch its /tokenize on; the check comes every five minutes.",
        )
    versions = [
        f"{pool['pool']} {pool['prompt_fingerprint'][:_DIGITS]}"
        for pool in index["pools"]
        if pool.get("prompt_fingerprint")
    ]
    count = len(facts.workers)
    return passed(f"{count} of {count} workers read the probes as we do; {listed(versions)}")


def cache_key(facts: Facts) -> Verdict:
    """Tokenizer, model and adapter in the key: nobody is handed another model's KV."""
    apart = [worker for worker in facts.workers if worker["is_apart"]]
    if apart:
        reasons = "; ".join(apart[0]["differences"])
        return failed(
            f"{listed([worker['id'] for worker in apart])} differ from their pool: {reasons}",
            "Give them the pool's model, tokenizer and KV format, or a pool of their own.",
        )
    for pool, hashes in facts.hashes.items():
        shared = _sharing(hashes)
        if shared:
            return failed(
                f"in pool {pool} one prompt has the same blocks for {listed(shared)}",
                "Do not serve these adapters from this pool; report it with `doctor --bundle`.",
            )
    unsaid = [worker["id"] for worker in facts.workers if not worker["fingerprint"]]
    adapters = sum(len(hashes) - 1 for hashes in facts.hashes.values())
    if unsaid or not facts.workers:
        return unknown(
            f"{listed(unsaid) or 'no worker'} says nothing of its weights and tokenizer",
            "Engines that name neither (/v1/models root, /tokenizer) must be told apart by hand: "
            "one pool per model, quantisation and tokenizer.",
        )
    kinds = len({worker["fingerprint"] for worker in facts.workers})
    return passed(
        f"{len(facts.workers)} workers of {kinds} kind{'s' * (kinds != 1)}, none apart from its "
        f"pool; {adapters} adapters with blocks of their own"
    )


def _sharing(hashes: dict[str, list[str]]) -> list[str]:
    """Return two names whose prompts begin with the same block, if there are such."""
    seen: dict[str, str] = {}
    for model, chain in hashes.items():
        if chain and chain[0] in seen:
            return [seen[chain[0]], model]
        if chain:
            seen[chain[0]] = model
    return []


def block_size(facts: Facts) -> Verdict:
    """Offload block size compatible: a worker's blocks are whole multiples of the index's."""
    wrong, unsaid, sizes = [], [], set()
    for worker in facts.workers:
        ours, theirs = worker["pool_block_size"], worker["block_size"]
        tiers = facts.caches.get(worker["id"], {}).get("block_size", theirs)
        if not ours or not theirs:
            unsaid.append(worker["id"])
        elif theirs % ours or tiers % theirs:
            wrong.append(f"{worker['id']} ({theirs} tokens, its tiers {tiers}, the index {ours})")
        else:
            sizes.add((worker["pool"], theirs))
    if wrong:
        return failed(
            f"no whole multiples: {listed(wrong)}",
            "Set pools[].block_size to a common divisor, and the chunk size of the offload "
            "connector to a multiple of the engine's block.",
        )
    if unsaid or not facts.workers:
        return unknown(
            f"{listed(unsaid) or 'no worker'} does not tell its block size",
            "Let the gateway scrape its /metrics (cache_config_info), or set pools[].block_size.",
        )
    mixed = len(sizes) > len({pool for pool, _ in sizes})
    shown = ", ".join(f"{pool} {tokens} tokens" for pool, tokens in sorted(sizes))
    if mixed:
        return warned(
            f"workers of one pool have blocks of several sizes: {shown}",
            "Start them with one block size: KV of different blocks cannot be pulled or shared.",
        )
    return passed(shown)
