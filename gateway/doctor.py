"""``warmlane doctor``: what costs hits on a running gateway, the most expensive first.

Reads what the admin endpoints tell and judges it; pure but for ``ask``. A finding is something an
operator can act on: what is wrong, where, and what to do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gateway.client import get_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Share of the index's bound from which on it drops blocks that a worker still holds.
FULL_RATIO = 0.95
# A template prints up to this many tokens before the first message.
START_TOKENS = 32
# Less than this share of all prompt tokens is what busy fleets lose in passing.
MIN_LOST_RATIO = 0.01
COLUMNS = ("tokens lost", "share", "requests", "cause", "where")


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
    """

    causes: list[dict[str, Any]]
    totals: dict[str, Any]
    findings: list[Finding]

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
        }


def ask(gateway: str, token: str | None) -> Diagnosis:
    """Ask a running gateway and judge its answers.

    Raises:
        ConnectionError: If it does not answer.
    """
    workers = get_json(gateway, "/admin/v1/workers", token)["workers"]
    pools = get_json(gateway, "/admin/v1/index", token)["pools"]
    misses = get_json(gateway, "/admin/v1/misses", token)
    return diagnose(workers, pools, misses)


def diagnose(
    workers: Sequence[dict[str, Any]], pools: Sequence[dict[str, Any]], misses: dict[str, Any]
) -> Diagnosis:
    """Judge what the admin endpoints answered.

    Args:
        workers: ``workers`` of ``GET /admin/v1/workers``.
        pools: ``pools`` of ``GET /admin/v1/index``.
        misses: ``GET /admin/v1/misses``.
    """
    causes = sorted(misses["causes"], key=lambda row: -row["tokens_lost"])
    findings = [finding for pool in pools for finding in _of_pool(pool)]
    findings += [finding for worker in workers for finding in _of_worker(worker)]
    return Diagnosis(causes, misses["totals"], findings)


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
    if ours is not None and theirs is not None and ours != theirs:
        yield Finding(
            "block_size",
            name,
            f"its block size is {theirs}, the pool's {ours}: it is routed by text",
            "Start it with the pool's block size, or put it into a pool of its own.",
        )
    yield from _of_events(worker, name)


def _of_events(worker: dict[str, Any], name: str) -> Iterator[Finding]:
    if worker["has_events"] and worker["mode"] == "approximate":
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


def table(diagnosis: Diagnosis) -> str:
    """Return the diagnosis for a terminal: causes, each with what to do, then the findings."""
    totals = diagnosis.totals
    lines = [
        f"{totals['tokens_lost']:,} of {totals['prompt_tokens']:,} prompt tokens in "
        f"{totals['requests']:,} requests were computed again because a prefix broke "
        f"(last {totals['window_s'] / 60:.0f} min)."
    ]
    if totals["not_compared"]:
        lines.append(f"{totals['not_compared']:,} more requests were too many to look into.")
    if diagnosis.causes:
        lines += ["", *_cause_lines(diagnosis.causes)]
    for finding in diagnosis.findings:
        lines += ["", f"{finding.subject}: {finding.what}", f"    {finding.advice}"]
    if diagnosis.is_healthy:
        lines += ["", "Nothing to mend."]
    return "\n".join(lines)


def _cause_lines(causes: list[dict[str, Any]]) -> Iterator[str]:
    rows = [COLUMNS, *map(_cause_row, causes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for number, row in enumerate(rows):
        # Numbers to the right, words to the left.
        cells = [
            cell.rjust(width) if column < 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
        if number:
            yield f"    {causes[number - 1]['advice']}"


def _cause_row(row: dict[str, Any]) -> tuple[str, ...]:
    example = row["example"]
    place = example["place"]
    if example["char"] is not None:
        place += f" character {example['char']}"
    if example["token"] < START_TOKENS and place:
        place += " (start of the prompt)"
    return (
        f"{row['tokens_lost']:,}",
        f"{row['share']:.0%}",
        f"{row['requests']:,}",
        row["cause"],
        f"{row['segment']}: {place}" if place else row["segment"],
    )
