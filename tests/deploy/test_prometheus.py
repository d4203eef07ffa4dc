"""Debian's Prometheus reads two gateways and two runners through a run, and answers dashboards.

Whatever a dashboard asks must have an answer, and the numbers must be those that the run's clients
saw. Grafana itself is not here: queries are sent as it would, with its variables filled in.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from deploy.dashboards.series import FILTERS
from gateway.telemetry.requests import (
    DURATION_BUCKETS_S,
    OUTPUT_TOKEN_BUCKETS_S,
    TTFT_BUCKETS_S,
)
from tests.deploy.dashboard_parts import (
    NAMES,
    Target,
    all_values,
    dashboard,
    filled,
    target,
    targets,
)
from tests.deploy.observed_fleet import TENANTS, observed_fleet
from tests.deploy.observed_run import Observed, observe

# Two runners start, on a machine that may be busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# What no healthy run of this size shows, and why.
WITHOUT_DATA = {
    "warmlane_label_overflows_total": "only configured names are seen",
    "warmlane_pull": "no runner lends KV to another",
    "warmlane_peer_": "no runner lends KV to another",
}
SHARES = {"0": "0 %", "lt_50": "1 to 49 %", "lt_90": "50 to 89 %", "ge_90": "90 to 100 %"}
# Grafana's least interval: four times that between two scrapes.
STEP_S, RATE_INTERVAL = 1, "4s"


@pytest.fixture(scope="module")
def observed(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    with observed_fleet(tmp_path_factory.mktemp("observed"), smollm2_dir) as fleet:
        yield observe(fleet)


def test_every_query_of_every_dashboard_has_an_answer(observed: Observed) -> None:
    empty = [query.id for query in targets() if not _points(observed, query)]
    excused = {query.id for query in targets() if any(name in query.expr for name in WITHOUT_DATA)}
    assert set(empty) - excused == set()
    # An excuse that nobody needs hides the next fault.
    assert excused - set(empty) == set()


def test_every_query_answers_under_every_filter(observed: Observed) -> None:
    chosen = {
        "job": "(warmlane-gateway|warmlane-runner)",
        "instance": "(" + "|".join(observed.prometheus.scraped_s()) + ")",
        "pool": "(chat)",
        "worker": "(w0|w1)",
        "prompt_length": "(lt_512|lt_2k)",
    }
    for query in targets():
        if _points(observed, query):
            assert _points(observed, query, chosen), query.id
    nowhere = dict.fromkeys(chosen, "nowhere")
    assert [query.id for query in targets() if _points(observed, query, nowhere)] == []


def test_variables_offer_what_there_is(observed: Observed) -> None:
    for name in NAMES:
        for variable in dashboard(name)["templating"]["list"]:
            if variable["type"] != "query":
                continue
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert match, variable
            selector = filled(match[1], all_values(name))
            values = observed.prometheus.get(f"label/{match[2]}/values", **{"match[]": selector})
            assert (
                values
                == {
                    "job": ["warmlane-gateway", "warmlane-runner"],
                    "instance": sorted(observed.prometheus.scraped_s()),
                    "pool": ["chat"],
                    "worker": ["w0", "w1"],
                    "prompt_length": ["lt_2k", "lt_512"],
                }[match[2]]
            )


def _points(observed: Observed, query: Target, chosen: dict[str, str] | None = None) -> list[float]:
    """What Grafana would draw: numbers of the run, at its steps."""
    variables = all_values(query.dashboard)
    values = variables | {k: v for k, v in (chosen or {}).items() if k in variables}
    if query.is_instant:
        window = f"{round(observed.window_s * 1000)}ms"
        expr = filled(query.expr, values | {"__range": window})
        rows = observed.prometheus.query(expr, observed.ended_s)
        found = [row["value"] for row in rows]
    else:
        expr = filled(query.expr, values | {"__rate_interval": RATE_INTERVAL})
        data = observed.prometheus.get(
            "query_range", query=expr, start=observed.began_s, end=observed.ended_s, step=STEP_S
        )
        found = [point for row in data["result"] for point in row["values"]]
    return [float(value) for _, value in found if math.isfinite(float(value))]


def test_series_have_the_labels_that_dashboards_filter_by(observed: Observed) -> None:
    for family, labels in FILTERS.items():
        names = f"{family}|{family}_bucket"
        rows = observed.prometheus.get(
            "series",
            **{"match[]": f'{{__name__=~"{names}",job=~"warmlane-.*"}}'},
            start=observed.began_s,
            end=observed.ended_s,
        )
        assert rows or any(name in family for name in WITHOUT_DATA), family
        for row in rows:
            assert {"pool", "worker"} & row.keys() == set(labels), family


def test_traffic_is_what_clients_saw(observed: Observed) -> None:
    answers, window_s = observed.answers, observed.window_s
    prompt = sum(it.prompt_tokens for it in answers)
    cached = sum(it.cached_tokens for it in answers)
    output = sum(it.output_tokens for it in answers)
    assert cached > 0.2 * prompt
    for title, seen in {
        "Requests": len(answers) / window_s,
        "Input tokens": prompt / window_s,
        "Output tokens": output / window_s,
        "Error ratio": sum(it.status >= 500 for it in answers) / len(answers),
        "Workers ready": 1.0,
        "Prefix hit ratio": cached / prompt,
        "Prefill saved": cached / window_s,
        "Prefill computed": (prompt - cached) / window_s,
    }.items():
        assert observed.number("overview", title) == pytest.approx(seen, rel=0.1), title
    outcomes = observed.by("overview", "Requests by outcome", "{{outcome}}", "outcome")
    good = sum(it.status == 200 for it in answers)
    assert outcomes["ok"] == pytest.approx(good / window_s, rel=0.1)
    assert observed.number("worth", "Prefix hit ratio") == pytest.approx(cached / prompt, rel=0.1)
    found = observed.number("routing", "Hit tokens", "observed")
    assert found == pytest.approx(cached / window_s, rel=0.1)


def test_times_are_what_the_log_says(observed: Observed) -> None:
    firsts = _known(observed.lines, "ttft_s")
    durations = _known(observed.lines, "duration_s")
    mean_s = observed.number("overview", "Time to first token", "mean")
    assert mean_s == pytest.approx(fmean(firsts), rel=0.1)
    # A client reads them later, and never earlier.
    assert mean_s <= 1.1 * fmean(it.ttft_s for it in observed.answers if it.ttft_s is not None)
    _assert_near(observed.number("overview", "TTFT p95"), firsts, TTFT_BUCKETS_S)
    _assert_near(observed.number("overview", "E2E p95"), durations, DURATION_BUCKETS_S)
    gaps = [
        (line["duration_s"] - line["ttft_s"]) / (line["completion_tokens"] - 1)
        for line in observed.lines
        if line["ttft_s"] is not None and (line["completion_tokens"] or 0) > 1
    ]
    _assert_near(observed.number("overview", "Inter-token p95"), gaps, OUTPUT_TOKEN_BUCKETS_S)


def test_predictions_are_what_the_log_says(observed: Observed) -> None:
    lines, window_s = observed.lines, observed.window_s
    predicted = sum(_known(lines, "predicted_hit_tokens"))
    shown = observed.number("routing", "Hit tokens", "predicted")
    assert shown == pytest.approx(predicted / window_s, rel=0.1)
    both = [it for it in lines if it["ttft_s"] and it["predicted_ttft_s"] is not None]
    shown = observed.number("routing", "TTFT, mean", "predicted")
    assert shown == pytest.approx(fmean(it["predicted_ttft_s"] for it in both), rel=0.1)
    decided = observed.by("routing", "Decisions by reason", "{{reason}}", "reason")
    reasons = Counter(line["reason"] for line in lines if line["worker"])
    compared = {
        reason for (reason,) in observed.begun("warmlane_routing_decisions_total", "reason")
    }
    assert sum(reasons[it] for it in compared) > reasons.total() / 2
    for reason in compared & reasons.keys():
        assert decided[reason] == pytest.approx(reasons[reason] / window_s, rel=0.1), reason
    routed = _known([it for it in lines if it["worker"]], "route_s")
    shown = observed.number("routing", "Time of a decision", "mean")
    assert shown == pytest.approx(fmean(routed), rel=0.1)


def _known(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if line[name] is not None]


def _assert_near(shown: float, times: list[float], bounds: tuple[float, ...]) -> None:
    """The p95 of buckets lies in the bucket of the true one, or where two of them meet."""
    true = sorted(times)[math.ceil(0.95 * len(times)) - 1]
    next_one = sorted(times)[min(len(times) - 1, math.ceil(0.95 * len(times)))]
    edges = (0.0, *bounds)
    lower = max(edge for edge in edges if edge < true)
    upper = min(edge for edge in edges if edge >= next_one)
    assert 0.9 * lower <= shown <= 1.1 * upper, (shown, true, next_one)


def test_a_hit_is_compared_within_prompts_of_one_length(observed: Observed) -> None:
    cells: dict[tuple[str, str], list[float]] = {}
    for line in observed.lines:
        if line["ttft_s"] is not None and line["observed_hit_tokens"] is not None:
            cells.setdefault(_cell(line), []).append(line["ttft_s"])
    shown = {
        title: {
            (metric["prompt_length"], metric["hit_share"]): value
            for metric, value in observed.table(target("worth", title))
        }
        for title in ("TTFT, mean", "Prefill per 1,000 prompt tokens, mean", "TTFT, p99")
    }
    begun = observed.begun("warmlane_ttft_by_hit_seconds_count", "prompt_length", "hit_share")
    old = {(length, SHARES[share]) for length, share in begun}
    compared = cells.keys() & old
    assert len(compared) >= 4, (cells.keys(), old)
    for cell in compared:
        seen_s = sum(cells[cell]) / len(cells[cell])
        assert shown["TTFT, mean"][cell] == pytest.approx(seen_s, rel=0.1), cell
        assert shown["TTFT, p99"][cell] >= 0.9 * seen_s, cell
    prefill = shown["Prefill per 1,000 prompt tokens, mean"]
    assert prefill["lt_2k", "90 to 100 %"] < prefill["lt_2k", "0 %"]
    assert observed.number("worth", "Prefill time saved") > 0.0
    assert observed.number("worth", "Workers' worth of prefill") > 0.0


def _cell(line: dict[str, Any]) -> tuple[str, str]:
    part = line["observed_hit_tokens"] / line["prompt_tokens"]
    share = "0" if not part else "lt_50" if part < 0.5 else "lt_90" if part < 0.9 else "ge_90"
    return "lt_512" if line["prompt_tokens"] < 512 else "lt_2k", SHARES[share]


def test_tenants_are_told_apart_as_clients_saw_them(observed: Observed) -> None:
    shown = target("worth", "Tokens by tenant", "{{tenant}} {{kind}}")
    tokens = {
        (metric["tenant"], metric["kind"]): value * observed.window_s
        for metric, value in observed.table(shown)
    }
    for tenant in TENANTS:
        answers = [it for it in observed.answers if it.tenant == tenant]
        for kind, seen in {
            "prompt": sum(it.prompt_tokens for it in answers),
            "cached": sum(it.cached_tokens for it in answers),
            "output": sum(it.output_tokens for it in answers),
        }.items():
            assert tokens[tenant, kind] == pytest.approx(seen, rel=0.1), (tenant, kind)


def test_a_worker_s_own_counts_reach_the_dashboards_once(observed: Observed) -> None:
    """Two gateways export each of them; adding both up would double it."""
    window_s, grown = observed.window_s, observed.runners
    evictions = sum(v for k, v in grown.items() if k.startswith("kv_cache_eviction_count"))
    assert evictions > 0
    shown = observed.total("workers", "Evictions by worker", "{{pool}} {{worker}}")
    assert shown == pytest.approx(evictions / window_s, rel=0.1)
    bytes_moved = target("workers", "Bytes moved", "{{tier}} {{direction}}")
    for labels, value in observed.table(bytes_moved):
        way = f"direction={labels['direction']},tier={labels['tier']}"
        moved = grown[f"warmlane_runner_transfer_bytes_total{{{way}}}"]
        assert value == pytest.approx(moved / window_s, rel=0.1), way
    hits = observed.by("workers", "Where hits were found", "{{tier}}", "tier")
    for tier, value in hits.items():
        found = grown[f"warmlane_runner_prefix_cache_hit_tokens_total{{tier={tier}}}"]
        assert value == pytest.approx(found / window_s, rel=0.1), tier
    assert hits["cpu"] + hits["disk"] > 0.0
    assert observed.number("workers", "Workers ready") == 2.0


def test_warm_up_is_what_its_client_was_told(observed: Observed) -> None:
    seen = observed.seen
    hit = observed.number("warmup", "Hit after warm-up")
    assert hit == pytest.approx(seen.warm_hit_tokens / observed.window_s, rel=0.1)
    computed = observed.number("warmup", "Computed ahead")
    assert computed >= 0.9 * seen.warm_computed_tokens / observed.window_s


def test_the_rules_load_and_every_one_is_evaluated(observed: Observed) -> None:
    groups = observed.prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 20
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}


def test_ttft_points_lead_to_traces(observed: Observed) -> None:
    found = observed.prometheus.get(
        "query_exemplars",
        query="warmlane_ttft_seconds_bucket",
        start=observed.began_s,
        end=observed.ended_s,
    )
    ids = [it["labels"]["trace_id"] for row in found for it in row["exemplars"]]
    assert ids
    assert all(re.fullmatch("[0-9a-f]{32}", it) for it in ids)


def test_prometheus_has_no_complaint_about_what_it_reads(observed: Observed) -> None:
    active: list[dict[str, Any]] = observed.prometheus.get("targets", state="active")[
        "activeTargets"
    ]
    assert {it["scrapeUrl"]: it["lastError"] for it in active if it["lastError"]} == {}
    assert len(active) == 4
    log = (observed.fleet.folder / "prometheus.log").read_text()
    assert [line for line in log.splitlines() if "level=error" in line] == []
