"""``warmlane doctor``: what costs hits on a running gateway, the most expensive first.

Reads what the admin endpoints tell and judges it; pure but for ``ask``. A finding is something an
operator can act on: what is wrong, where, and what to do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

from gateway.client import NotThereError, get_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Share of the index's bound from which on it drops blocks that a worker still holds.
FULL_RATIO = 0.95
# Less than this share of all prompt tokens is what busy fleets lose in passing.
MIN_LOST_RATIO = 0.01


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it could be.

    Attributes:
        kind: Name for programs.
        subject: Worker or pool.
        what: What is wrong.
        advice: What to do.
    """

    kind: str
    subject: str
    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything found.

    Attributes:
        causes: Rows of the miss report, most tokens lost first.
        totals: Its totals.
        findings: About workers and pools.
        worth: The worth report; None from a gateway that has none.
    """

    causes: list[dict[str, Any]]
    totals: dict[str, Any]
    findings: list[Finding]
    worth: dict[str, Any] | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found that is worth an operator's time."""
        least = MIN_LOST_RATIO * self.totals["prompt_tokens"]
        return not self.findings and all(row["tokens_lost"] < least for row in self.causes)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "ok": self.is_healthy,
            "causes": self.causes,
            "totals": self.totals,
            "findings": [asdict(finding) for finding in self.findings],
            "worth": self.worth,
        }


def ask(gateway: str, token: str | None) -> Diagnosis:
    """Ask a running gateway and judge its answers.

    Raises:
        ConnectionError: If it does not answer.
    """
    workers = get_json(gateway, "/admin/v1/workers", token)["workers"]
    pools = get_json(gateway, "/admin/v1/index", token)["pools"]
    misses = get_json(gateway, "/admin/v1/misses", token)
    try:
        worth = get_json(gateway, "/admin/v1/worth", token)
    except NotThereError:  # an older gateway
        worth = None
    return diagnose(workers, pools, misses, worth)


def diagnose(
    workers: Sequence[dict[str, Any]],
    pools: Sequence[dict[str, Any]],
    misses: dict[str, Any],
    worth: dict[str, Any] | None = None,
) -> Diagnosis:
    """Judge what the admin endpoints answered.

    Args:
        workers: ``workers`` of ``GET /admin/v1/workers``.
        pools: ``pools`` of ``GET /admin/v1/index``.
        misses: ``GET /admin/v1/misses``.
        worth: ``GET /admin/v1/worth``; None if the gateway has no such path.
    """
    causes = sorted(misses["causes"], key=lambda row: -row["tokens_lost"])
    findings = [finding for pool in pools for finding in _of_pool(pool)]
    findings += [finding for worker in workers for finding in _of_worker(worker)]
    if worth is not None:
        findings += [finding for row in worth["pools"] for finding in _of_worth(row, workers)]
    return Diagnosis(causes, misses["totals"], findings, worth)


def _of_pool(pool: dict[str, Any]) -> Iterator[Finding]:
    name = f"pool {pool['pool']}"
    if not pool["reads_prompts"]:
        yield Finding(
            "no_tokenizer",
            name,
            "prompts are not read, so requests are routed by text",
            "Configure pools[].tokenizer; check that a worker reports its block size.",
        )
    unread = sum(pool["unread_prompts"].values())
    if unread:
        reasons = ", ".join(f"{n} {reason}" for reason, n in pool["unread_prompts"].items())
        yield Finding(
            "unread_prompts",
            name,
            f"{unread} prompts could not be read and were routed by text ({reasons})",
            "Explain one of them (`warmlane explain`); check the chat template.",
        )
    if pool["max_blocks"] and pool["blocks"] >= FULL_RATIO * pool["max_blocks"]:
        yield Finding(
            "index_full",
            name,
            f"the index holds {pool['blocks']} of {pool['max_blocks']} blocks",
            "Raise index.max_blocks.",
        )
    shared = pool.get("shared") or {}
    if shared.get("is_up") is False:
        down_s = shared.get("down_s")
        since = "" if down_s is None else f" for {down_s:.0f} s"
        yield Finding(
            "shared_index_down",
            name,
            f"Redis has not answered{since}: gateways share neither index nor load",
            "Look at the server of index.url; requests are served meanwhile.",
        )


def _of_worker(worker: dict[str, Any]) -> Iterator[Finding]:
    name = f"worker {worker['id']}"
    if not worker["ready"]:
        yield Finding("not_ready", name, "its checks fail", f"Look at {worker['url']}/health.")
    if worker["parity"] == 0:
        yield Finding(
            "parity_diverged",
            name,
            _divergence(worker["divergence"]),
            "Give the pool the worker's own tokenizer and chat template, and its engine kind.",
        )
    ours, theirs = worker["pool_block_size"], worker["block_size"]
    if ours is not None and theirs is not None and theirs % ours:
        yield Finding(
            "block_size",
            name,
            f"its block size is {theirs}, no whole multiple of the pool's {ours}: it is routed by "
            "text",
            f"Set pools[].block_size to {gcd(ours, theirs)}, or put it into a pool of its own.",
        )
    if worker.get("is_apart"):
        yield Finding(
            "apart",
            name,
            "it is not what most of its pool is, so it serves only if nobody else can: "
            + "; ".join(worker["differences"]),
            "Give it the pool's model, tokenizer and KV format, or a pool of its own.",
        )
    yield from _of_events(worker, name)


def _of_worth(row: dict[str, Any], workers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Find tiers that are used and lose time; what nobody uses costs nobody."""
    used = {tier for w in workers if w["pool"] == row["pool"] for tier in w["blocks"]} - {"gpu"}
    if row["verdict"] != "no" or not used:
        return
    if row["reuse_gain_s"] <= 0.0 and row["reuse_count"] >= 1.0:
        what = (
            f"bringing {row['shared_prefix_tokens']:,.0f} tokens back from {_names(used)} takes "
            f"{row['restore_s']:.3f} s, computing them {row['recompute_s']:.3f} s"
        )
    else:
        what = (
            f"what is kept in {_names(used)} saves {row['saved_s']:.2f} s an hour and costs "
            f"{row['store_s'] + row['eviction_s']:.2f} s"
        )
    yield Finding(
        "offload_not_worth",
        f"pool {row['pool']}",
        what,
        "Set pools[].offload.max_offload_tokens, so that the gateway caps each request by what "
        "its tenant and document are worth; or 0 to offload nothing.",
    )


def _names(tiers: set[str]) -> str:
    return " and ".join(tier for tier in ("cpu", "disk", "remote") if tier in tiers)


def _of_events(worker: dict[str, Any], name: str) -> Iterator[Finding]:
    health = worker.get("event_health", "")
    if health.startswith("kv_events_"):
        yield Finding(
            health,
            name,
            worker["event_why"] or "its KV events are not believed",
            "Until then its cache is only modelled by what is sent to it.",
        )
    elif worker["has_events"] and worker["mode"] == "approximate":
        yield Finding(
            "no_events",
            name,
            "KV events are configured but do not come: its cache is only modelled",
            "Check its kv_events address, and that the engine publishes (--kv-events-config).",
        )
    if worker["gaps"]:
        yield Finding(
            "event_gaps",
            name,
            f"KV events were missing {worker['gaps']} times",
            "Configure kv_replay, and a larger buffer_steps on the engine.",
        )
    if worker["decode_errors"]:
        yield Finding(
            "decode_errors",
            name,
            f"{worker['decode_errors']} messages at its kv_events address were no events",
            "Check that the address is a KV event publisher of a supported version.",
        )


def _divergence(found: dict[str, Any] | None) -> str:
    if found is None:
        return "the token counts in its answers differ from ours"
    return (
        f"its tokens differ from ours: probe {found['probe']!r} at token {found['position']} "
        f"(ours {found['ours']}, its {found['theirs']}; {found['our_tokens']} tokens against "
        f"{found['their_tokens']}), text {found['text']!r}"
    )
