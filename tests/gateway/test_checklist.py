"""Every line of the go-live checklist comes out each way, and says what it saw."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.doctor.checklist.exposition import family_names, samples_of
from gateway.doctor.checklist.facts import Facts
from gateway.doctor.checklist.names import ALERTS, METRICS, OPTIONAL_METRICS
from gateway.doctor.checklist.run import LINES, run
from gateway.doctor.checklist.verdict import Verdict
from tests.gateway.checklist_parts import (
    cause,
    disk_test,
    healthy,
    hot,
    metrics_text,
    worker,
)

RULES = Path(__file__).resolve().parents[2] / "helm" / "warmlane" / "rules" / "warmlane.yaml"

Change = Callable[[Facts], object]


def verdict_of(facts: Facts, name: str) -> Verdict:
    return next(line.verdict for line in run(facts).lines if line.name == name)


def misses(*causes: dict[str, Any], requests: int = 100) -> Change:
    totals = {"requests": requests, "prompt_tokens": 100_000}
    return lambda f: f.documents.update(misses={"causes": list(causes), "totals": totals})


def hints(requests: int, documents: int, chunks: int) -> Change:
    row = {"pool": "chat", "requests": requests}
    row |= {"with_documents": documents, "with_chunks": chunks}
    return lambda f: f.documents["worth"].update(hints=[row])


def workers(**fields: Any) -> Change:
    """Change the second worker only: one is enough to be said."""
    return lambda f: setattr(f, "workers", [worker("w0"), worker("w1", **fields)])


def routing(mode: str, share: float) -> Change:
    return lambda f: f.documents["config"]["settings"]["routing"].update(mode=mode, share=share)


def worth(**fields: Any) -> Change:
    return lambda f: f.documents["worth"]["pools"][0].update(fields)


def documents(*rows: dict[str, Any]) -> Change:
    return lambda f: f.documents.update(documents={"documents": list(rows), "warmed": []})


def warmed(tiers: list[str]) -> Change:
    copies = [{"worker": "w0", "tiers": tiers}] if tiers else []
    row = {"tokens": 4096, "copies": copies}
    return lambda f: f.documents.update(documents={"documents": [], "warmed": [row]})


def metrics(**fields: Any) -> Change:
    return lambda f: setattr(f, "metrics", metrics_text(**fields))


def no_cpu_tier(capacity_tokens: int) -> Change:
    def change(facts: Facts) -> None:
        for row in facts.workers:
            row["capacity_tokens"] = capacity_tokens
        for found in facts.caches.values():
            del found["tiers"]["cpu"]

    return change


def selftest(**fields: Any) -> Change:
    return lambda f: f.selftests.update(w0=disk_test(**fields))


def no_disks(*, says_so: bool = True) -> Change:
    def change(facts: Facts) -> None:
        facts.selftests.clear()
        facts.caches["w0"]["tiers"].pop("disk")
        if not says_so:
            facts.caches.clear()
            facts.workers[0]["blocks"]["disk"] = 4

    return change


def refused_selftest(facts: Facts) -> None:
    facts.selftests.clear()
    facts.missing["selftest of w0"] = "429: a moment ago"


def tier_block(size: int) -> Change:
    return lambda f: f.caches["w0"].update(block_size=size)


def mixed_blocks(facts: Facts) -> None:
    workers(block_size=32)(facts)
    facts.caches["w1"]["block_size"] = 32


def offload(cap: int | None) -> Change:
    pools = [{"name": "chat", "offload": {"max_offload_tokens": cap, "scope": "history"}}]
    return lambda f: f.documents["config"]["settings"].update(pools=pools)


def nothing_beneath(facts: Facts) -> None:
    facts.caches.clear()
    for row in facts.workers:
        row["blocks"] = {"gpu": 4}
    offload(None)(facts)


def without_metric(name: str) -> Change:
    def change(facts: Facts) -> None:
        assert facts.metrics is not None
        lines = facts.metrics.splitlines()
        facts.metrics = "\n".join(line for line in lines if name not in line) + "\n"

    return change


def rules(**health: str) -> Change:
    return lambda f: setattr(f, "rules", dict.fromkeys(ALERTS, "ok") | health)


def without_rule(facts: Facts) -> None:
    assert facts.rules is not None
    del facts.rules["WarmlaneCacheThrashing"]


def separate(facts: Facts) -> None:
    advice = {"kind": "separate_pool", "tenant": "batch", "text": "Tenant 'batch' fills it."}
    facts.documents["worth"]["advice"] = [advice]


def adapter_shares(facts: Facts) -> None:
    facts.hashes["chat"]["law"] = facts.hashes["chat"]["m"]


def unread(facts: Facts) -> None:
    facts.documents["index"]["pools"][0]["reads_prompts"] = False


def without(name: str) -> Change:
    def change(facts: Facts) -> None:
        facts.documents.pop(name)
        facts.missing[name] = "404: no such path"

    return change


def no_metrics(facts: Facts) -> None:
    facts.metrics = None


APART = {"is_apart": True, "differences": ["w1: other weights"]}
# Line, what is changed of a healthy fleet, what comes of it, what the evidence says.
CASES: list[tuple[str, Change, str, str]] = [
    ("system_prompt", misses(cause("datetime", "system", 20_000)), "fail", "20.0% of 100,000"),
    ("system_prompt", misses(cause("uuid", "system", 3_000)), "warn", "to uuid (90 requests)"),
    ("system_prompt", misses(cause("uuid", "system", 900)), "pass", "0.9%"),
    ("system_prompt", misses(cause("not_cached", "system", 50_000)), "pass", "0.0%"),
    ("system_prompt", misses(cause("datetime", "history", 50_000)), "pass", "0.0%"),
    ("system_prompt", misses(requests=19), "warn", "unknown: only 19 requests"),
    ("system_prompt", without("misses"), "warn", "unknown: 404"),
    ("tool_schemas", misses(cause("tool_order", "tools", 20_000)), "fail", "to tool_order"),
    ("tool_schemas", misses(cause("tools_changed", "system", 3_000)), "warn", "3.0%"),
    ("tool_schemas", misses(cause("datetime", "system", 50_000)), "pass", "0.0%"),
    ("tool_schemas", misses(requests=0), "warn", "unknown"),
    ("document_ids", hints(100, 10, 10), "warn", "of 100 requests 10 name a document"),
    ("document_ids", hints(100, 90, 0), "warn", "0 its chunks"),
    ("document_ids", hints(19, 19, 19), "warn", "unknown: only 19"),
    ("document_ids", without("worth"), "warn", "unknown: 404"),
    ("template", workers(parity=0), "fail", "tokens of w1 differ"),
    ("template", workers(parity=-1), "warn", "unknown: w1 did not say"),
    ("template", unread, "fail", "not read at all"),
    ("template", without("index"), "warn", "unknown"),
    ("cache_key", workers(**APART), "fail", "w1 differ from their pool: w1: other weights"),
    ("cache_key", workers(fingerprint=None), "warn", "unknown: w1 says nothing"),
    ("cache_key", adapter_shares, "fail", "same blocks for m, law"),
    ("cache_aware_routing", routing("least_load", 100), "fail", "least_load"),
    ("cache_aware_routing", routing("cost", 0), "fail", "share 0 %"),
    ("cache_aware_routing", routing("observe", 100), "warn", "observe"),
    ("cache_aware_routing", routing("cost", 30), "warn", "share 30 %"),
    ("cache_aware_routing", workers(mode="text"), "fail", "w1 are routed by text"),
    ("cache_aware_routing", without("config"), "warn", "unknown"),
    ("hot_documents", documents(hot("a"), hot("b", "disk")), "fail", "0% of the 4,096"),
    ("hot_documents", documents(hot("a", "gpu"), hot("b"), hot("c", "gpu")), "warn", "67%"),
    ("hot_documents", documents(hot("a", "gpu"), hot("b", reuses=0.1)), "pass", "1 hot"),
    ("hot_documents", warmed(["gpu"]), "pass", "0 hot and 1 warmed"),
    ("hot_documents", warmed([]), "fail", "0% of the 4,096"),
    ("hot_documents", documents(), "warn", "unknown: nothing was asked for again"),
    ("separate_pools", separate, "warn", "Tenant 'batch' fills it."),
    ("separate_pools", worth(requests=49.0), "warn", "unknown: only 49 requests"),
    ("cold_start", metrics(cold=(0, 10, 20, 20)), "fail", "50% of 20 cold prompts"),
    ("cold_start", metrics(cold=(0, 18, 20, 20)), "warn", "90% of 20"),
    ("cold_start", metrics(cold=(0, 19, 20, 20)), "pass", "95% of 20"),
    ("cold_start", metrics(cold=(9, 9, 9, 9)), "warn", "unknown: only 9 streamed"),
    ("cold_start", no_metrics, "warn", "unknown"),
    ("kv_watermark", metrics(usage={}), "fail", "no worker says"),
    ("kv_watermark", metrics(usage={"w0": 0.9}), "warn", "w1 do not say"),
    ("kv_watermark", no_metrics, "warn", "unknown"),
    ("cpu_tier", worth(reusable_tokens=32_001), "fail", "its CPU tier holds 32,000"),
    ("cpu_tier", worth(reusable_tokens=32_000), "pass", "reuses prefixes of 32,000"),
    ("cpu_tier", no_cpu_tier(9_999), "warn", "no CPU tier is known"),
    ("cpu_tier", no_cpu_tier(10_000), "pass", "device memory alone holds 20,000"),
    ("cpu_tier", worth(requests=3.0), "warn", "unknown: pool chat has not shown"),
    ("disk_threads", selftest(ok=False, damaged=3), "fail", "w0: 3 damaged"),
    ("disk_threads", selftest(ok=False, failed_reads=1), "fail", "1 reads"),
    ("disk_threads", refused_selftest, "warn", "unknown: no selftest of w0: 429"),
    ("disk_threads", no_disks(), "pass", "no worker has a disk tier"),
    ("disk_threads", no_disks(says_so=False), "warn", "unknown: w0 keep KV on disk"),
    ("block_size", workers(block_size=24), "fail", "w1 (24 tokens"),
    ("block_size", tier_block(24), "fail", "its tiers 24"),
    ("block_size", mixed_blocks, "warn", "several sizes"),
    ("block_size", workers(block_size=None), "warn", "unknown: w1 does not tell"),
    ("stable_offload", offload(None), "fail", "offloads to cpu and disk without a cap"),
    ("stable_offload", offload(512), "pass", "at most 512 tokens, up to the end of history"),
    ("stable_offload", nothing_beneath, "pass", "nothing is offloaded"),
    ("stable_offload", without("config"), "warn", "unknown"),
    ("metrics", without_metric("warmlane_gate_waiting"), "fail", "warmlane_gate_waiting"),
    ("metrics", without_metric("ttft_p95"), "pass", "nobody reports ttft_p95"),
    ("metrics", no_metrics, "warn", "unknown"),
    ("alerts", without_rule, "fail", "WarmlaneCacheThrashing"),
    ("alerts", rules(WarmlaneIndexGap="err"), "fail", "WarmlaneIndexGap cannot be evaluated"),
    ("alerts", lambda f: setattr(f, "rules", None), "warn", "unknown: Prometheus was not asked"),
]


@pytest.mark.parametrize(("name", "change", "status", "said"), CASES)
def test_a_line_comes_out_as_its_evidence_says(
    name: str, change: Change, status: str, said: str
) -> None:
    facts = healthy()
    change(facts)
    verdict = verdict_of(facts, name)

    assert verdict.status == status, verdict
    assert said in verdict.evidence
    assert bool(verdict.advice) == (status != "pass"), "whatever is not right says what to do"
    assert verdict.is_known == (not verdict.evidence.startswith("unknown: "))


def test_a_healthy_fleet_passes_every_line() -> None:
    found = run(healthy())

    assert [
        (line.name, line.verdict) for line in found.lines if line.verdict.status != "pass"
    ] == []
    assert (found.status, found.exit_code) == ("pass", 0)
    assert found.to_json()["ok"]


def test_every_line_is_seen_to_pass_and_not_to_pass() -> None:
    # ``healthy`` is a pass of each; document ids and separate pools may only warn.
    names = {name for name, _, _ in LINES}
    assert {name for name, _, status, _ in CASES if status != "pass"} == names
    assert names - {name for name, _, status, _ in CASES if status == "fail"} == {
        "document_ids",
        "separate_pools",
    }


def test_the_worst_line_decides_the_exit_code() -> None:
    warns, fails = healthy(), healthy()
    routing("cost", 30)(warns)
    routing("least_load", 100)(fails)
    unread(fails)

    assert [(run(facts).status, run(facts).exit_code) for facts in (warns, fails)] == [
        ("warn", 3), ("fail", 1)
    ]  # fmt: skip
    text = run(fails).to_text()
    assert text.endswith("14 pass, 0 warn, 2 fail.")
    assert len(text.splitlines()) == len(LINES) + 2 + 2, "a line each, and what to do beneath two"


def test_a_gateway_that_tells_only_its_workers_is_unknown_not_well() -> None:
    found = run(Facts([worker("w0")], missing={"metrics": "no answer"}))

    known = {line.name for line in found.lines if line.verdict.is_known}
    # What the workers' own rows tell.
    assert known <= {"cache_key", "block_size", "stable_offload", "disk_threads"}
    assert found.exit_code in (1, 3)


def test_the_alerts_are_those_that_are_shipped() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    shipped = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}

    assert shipped == set(ALERTS)


def test_the_metrics_are_those_that_the_alerts_read() -> None:
    rules_text = RULES.read_text()
    named = re.findall(r"(?<![\w:])(warmlane_[a-z0-9_]+)(?![\w:])", rules_text)
    read = {re.sub(r"_(bucket|count|sum)$", "", name) for name in named}
    # What runners export is not the gateway's to have.
    of_gateway = {name for name in read if not name.startswith("warmlane_runner_")}

    assert of_gateway - {*METRICS, *OPTIONAL_METRICS} == set()


def test_families_are_read_as_they_are_written() -> None:
    text = metrics_text()
    assert set(METRICS) <= family_names(text)
    counter = "# TYPE warmlane_warm_keep_runs_total counter\n" + (
        'warmlane_warm_keep_runs_total{pool="chat",why="restart"} 3.0\n'
        'warmlane_warm_keep_runs_of_others{pool="chat"} 9.0\n'
    )
    found = list(samples_of(counter, "warmlane_warm_keep_runs"))
    assert [(dict(labels), value) for labels, _, value in found] == [
        ({"pool": "chat", "why": "restart"}, 3.0)
    ]
