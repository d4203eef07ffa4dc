"""The lines in their order, and all of them run over the facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gateway.doctor.checklist import identity, prompts, routing, tiers, warmth, watching
from gateway.doctor.checklist.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.doctor.checklist.facts import Facts
    from gateway.doctor.checklist.verdict import Status

    Check = Callable[[Facts], Verdict]

# From what clients send to who notices. Names are for programs and do not change.
LINES: tuple[tuple[str, str, Check], ...] = (
    ("system_prompt", "system prompt stable", prompts.system_prompt),
    ("tool_schemas", "tool schemas stable", prompts.tool_schemas),
    ("document_ids", "document and chunk ids present", prompts.document_ids),
    ("template", "template versioned and in parity", identity.template),
    ("cache_key", "tokenizer, model and adapter in the key", identity.cache_key),
    ("cache_aware_routing", "cache-aware routing on", routing.cache_aware),
    ("hot_documents", "hot documents warm", warmth.hot_documents),
    ("separate_pools", "pools separated where it pays", routing.separated),
    ("cold_start", "cold start after a restart acceptable", warmth.cold_start),
    ("kv_watermark", "KV watermark visible", tiers.kv_watermark),
    ("cpu_tier", "CPU tier larger than the reusable prefixes", tiers.cpu_tier),
    ("disk_threads", "SSD threads stress-tested", tiers.disk_threads),
    ("block_size", "offload block size compatible", identity.block_size),
    ("stable_offload", "only stable tokens offloaded", tiers.stable_offload),
    ("metrics", "every metric present", watching.metrics),
    ("alerts", "every alert present", watching.alerts),
)
# The command's own: all pass, partial, failed.
EXIT_CODES: dict[Status, int] = {"pass": 0, "warn": 3, "fail": 1}


@dataclass(frozen=True, slots=True)
class Line:
    """A line with what it came to."""

    name: str
    title: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Checklist:
    """All lines of one run."""

    lines: Sequence[Line]

    @property
    def status(self) -> Status:
        """The worst of all lines."""
        found = {line.verdict.status for line in self.lines}
        return "fail" if "fail" in found else "warn" if "warn" in found else "pass"

    @property
    def exit_code(self) -> int:
        """0 all pass, 3 something warns or is unknown, 1 something fails."""
        return EXIT_CODES[self.status]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        lines = [{"name": li.name, "title": li.title, **asdict(li.verdict)} for li in self.lines]
        return {"ok": self.status == "pass", "status": self.status, "lines": lines}

    def to_text(self) -> str:
        """Return it for a terminal: a line each, with what to do beneath."""
        width = max(len(line.title) for line in self.lines)
        shown = []
        for line in self.lines:
            verdict = line.verdict
            shown.append(f"{verdict.status:4}  {line.title:{width}}  {verdict.evidence}")
            if verdict.advice:
                shown.append(f"{'':4}  {'':{width}}  -> {verdict.advice}")
        counts = [line.verdict.status for line in self.lines]
        ends = ", ".join(f"{counts.count(status)} {status}" for status in EXIT_CODES)
        return "\n".join([*shown, "", f"{ends}."])


def run(facts: Facts) -> Checklist:
    """Judge all lines. Pure."""
    return Checklist([Line(name, title, check(facts)) for name, title, check in LINES])
