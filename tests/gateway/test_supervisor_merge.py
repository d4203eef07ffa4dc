"""Several processes' metrics and admin answers as one gateway's."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.supervisor.documents import merge_index, merge_misses, merge_workers, merge_worth
from gateway.supervisor.exposition import accumulate, merge, parse, render
from gateway.supervisor.windows import ProcessWindows, merging_windows, pack, unpack
from gateway.telemetry.exposition import write
from gateway.telemetry.observed import Recent, gauges
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.requests import Telemetry

TEXT = """# HELP warmlane_requests_total Finished requests
# TYPE warmlane_requests_total counter
warmlane_requests_total{{pool="p",worker="w0",outcome="ok"}} {requests}
# HELP warmlane_ttft_seconds Time to first token
# TYPE warmlane_ttft_seconds histogram
warmlane_ttft_seconds_bucket{{le="1.0"}} {requests}
warmlane_ttft_seconds_bucket{{le="+Inf"}} {requests}
warmlane_ttft_seconds_count {requests}
warmlane_ttft_seconds_sum 1.5
# HELP prefix_cache_hit_tokens Prompt tokens that workers reported as cached
# TYPE prefix_cache_hit_tokens untyped
prefix_cache_hit_tokens{{scope="fleet",worker=""}} {hits}
# HELP kv_cache_eviction_count As reported by the workers
# TYPE kv_cache_eviction_count untyped
kv_cache_eviction_count{{scope="fleet",worker=""}} {evictions}
# HELP warmlane_worker_ready 1 while checks pass
# TYPE warmlane_worker_ready gauge
warmlane_worker_ready{{pool="p",worker="w0"}} {ready}
# HELP warmlane_in_flight_requests Sent and not finished
# TYPE warmlane_in_flight_requests gauge
warmlane_in_flight_requests{{pool="p",worker="w0"}} {flight}
# HELP warmlane_worker_event_age_seconds Time since the worker's last KV event
# TYPE warmlane_worker_event_age_seconds gauge
warmlane_worker_event_age_seconds{{pool="p",worker="w0"}} {age}
# HELP ttft_p95 95th percentile
# TYPE ttft_p95 gauge
ttft_p95{{scope="fleet",worker=""}} 0.7
"""


def text(**values: float) -> str:
    given: dict[str, float] = {
        "requests": 0, "hits": 0, "evictions": 0, "ready": 1, "flight": 0, "age": 0
    }  # fmt: skip
    return TEXT.format(**{**given, **values})


def samples(data: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f" {v}" for v in sample.labels.values() if v): sample.value
        for family in text_string_to_metric_families(data.decode())
        for sample in family.samples
    }


def test_counts_add_up_and_gauges_mean_what_they_say() -> None:
    a = parse(text(requests=3, hits=100, evictions=7, ready=1, flight=2, age=0.5))
    b = parse(text(requests=4, hits=50, evictions=7, ready=0, flight=1, age=9.0))

    found = samples(render(merge([a, b], {})))

    assert found["warmlane_requests_total p w0 ok"] == 7
    assert found["warmlane_ttft_seconds_bucket 1.0"] == 7
    assert found["warmlane_ttft_seconds_sum"] == 3.0
    assert found["prefix_cache_hit_tokens fleet"] == 150
    assert found["kv_cache_eviction_count fleet"] == 7, "all read the same workers"
    assert found["warmlane_worker_ready p w0"] == 0
    assert found["warmlane_in_flight_requests p w0"] == 3
    assert found["warmlane_worker_event_age_seconds p w0"] == 9.0
    assert "ttft_p95 fleet" not in found, "quantiles come from the windows"


def window_gauges(processes: list[ProcessWindows]) -> dict[str, float]:
    scopes: dict[tuple[str, str], Recent] = {}
    for _ in merging_windows(processes, 1000.0, scopes):
        pass
    return samples("".join(write(gauges(scopes), open_metrics=False)).encode())


def test_help_and_type_stand_once_and_the_text_is_valid() -> None:
    merged = render(merge([parse(text()), parse(text())], {}))

    lines = merged.decode().splitlines()
    heads = [line for line in lines if line.startswith("#")]
    assert len(heads) == len(set(heads))
    assert {line.split()[1] for line in heads} == {"HELP", "TYPE"}


counts = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["grow", "die"]), st.integers(0, 9)), max_size=40
)


@settings(deadline=None)
@given(counts)
def test_no_counter_ever_goes_back_whoever_dies(history: list[tuple[int, str, int]]) -> None:
    requests = [0, 0, 0]
    ended: dict[str, Any] = {}
    last = 0.0
    for process, what, amount in history:
        if what == "grow":
            requests[process] += amount
        else:
            accumulate(ended, parse(text(requests=requests[process], hits=requests[process])))
            requests[process] = 0
        living = [parse(text(requests=n, hits=n)) for n in requests]
        found = samples(render(merge(living, ended)))
        total = found["warmlane_requests_total p w0 ok"]
        assert total >= last
        assert found["prefix_cache_hit_tokens fleet"] == total
        last = total
    assert last == sum(amount for _, what, amount in history if what == "grow")


def test_quantiles_are_those_of_all_processes_requests_together() -> None:
    rng = random.Random(5)
    whole = Telemetry(clock=lambda: 1000.0)
    parts = [Telemetry(clock=lambda: 1000.0) for _ in range(3)]
    for number in range(300):
        record = RequestRecord(
            "r", "chat", pool="p", worker=f"w{number % 2}", outcome="ok", prompt_tokens=100
        )
        record.ttft_s = rng.lognormvariate(-1.0, 1.0) * (1 + number % 3)
        record.observed_hit_tokens = rng.randrange(100)
        for telemetry in (whole, parts[number % 3]):
            telemetry.observe(record)

    merged = window_gauges([unpack(pack(part)) for part in parts])

    for scope, observed in (("fleet", whole.fleet), ("worker w1", whole.workers["w1"])):
        assert merged[f"ttft_p95 {scope}"] == observed.ttft_s.quantile(0.95, 1000.0)
        assert merged[f"ttft_p99 {scope}"] == observed.ttft_s.quantile(0.99, 1000.0)
        assert merged[f"ttft_avg {scope}"] == pytest.approx(observed.ttft_s.mean(1000.0))
        assert merged[f"prefix_cache_hit_rate {scope}"] == pytest.approx(observed.hit_rate(1000.0))


def test_a_window_that_nobody_filled_gives_no_gauge() -> None:
    assert window_gauges([unpack(pack(Telemetry(clock=lambda: 1000.0)))]) == {}


def worker_row(**more: Any) -> dict[str, Any]:
    return {
        "id": "w0", "in_flight": 1, "queued_tokens": 10, "gaps": None, "decode_errors": None,
        "event_age_s": None, "event_health": "unknown", "event_why": "", "ready": True,
        "state": "ready", "blocks": {"gpu": 5}, "mode": "exact",
    } | more  # fmt: skip


def test_workers_rows_are_merged_by_id() -> None:
    merged = merge_workers(
        [
            {"workers": [worker_row(), worker_row(id="w1")]},
            {
                "workers": [
                    worker_row(
                        in_flight=2, gaps=3, decode_errors=0, event_age_s=1.0, ready=False,
                        state="open", blocks={"gpu": 7, "cpu": 1}, event_health="fresh",
                    )
                ]
            },
        ]
    )  # fmt: skip

    first, second = merged["workers"]
    assert (first["in_flight"], first["queued_tokens"]) == (3, 20)
    assert (first["gaps"], first["decode_errors"], first["event_age_s"]) == (3, 0, 1.0)
    assert first["event_health"] == "fresh", "as the process says that reads its events"
    assert (first["ready"], first["state"]) == (False, "open")
    assert first["blocks"] == {"gpu": 7, "cpu": 1}
    assert second["id"] == "w1"


def test_the_index_is_the_fullest_view_with_all_unread_prompts() -> None:
    def state(gaps: int | None) -> dict[str, Any]:
        return {"followed": gaps is not None, "gaps": gaps, "blocks": {"gpu": 3}}

    rows = [
        {
            "pool": "p", "blocks": blocks, "unread_prompts": {"TemplateError": 2},
            "by_tier": {"gpu": blocks}, "age_s": age, "workers": {"w0": state(gaps)},
        }
        for blocks, age, gaps in ((10, None, None), (12, 1.0, 4))
    ]  # fmt: skip

    (merged,) = merge_index([{"pools": [row]} for row in rows])["pools"]

    assert (merged["blocks"], merged["by_tier"], merged["age_s"]) == (12, {"gpu": 12}, 1.0)
    assert merged["unread_prompts"] == {"TemplateError": 4}
    assert merged["workers"]["w0"]["gaps"] == 4


def worth_row(**more: Any) -> dict[str, Any]:
    return {
        "pool": "p", "tenant": "t", "document": "d", "kind": "document", "verdict": "worth",
        "requests": 2.0, "saved_s": 1.0, "prompt_tokens": 100, "shared_tokens": 50,
        "lost_tokens": 5, "store_tokens": 9,
    } | more  # fmt: skip


def test_worth_adds_up_and_judges_as_who_saw_most() -> None:
    def report(**more: Any) -> dict[str, Any]:
        row = worth_row(**more)
        return {"pools": [row], "tenants": [row], "documents": [row], "advice": ["one"]}

    merged = merge_worth([report(), report(requests=5.0, verdict="not_worth")])

    for name in ("pools", "tenants", "documents"):
        (row,) = merged[name]
        assert (row["requests"], row["shared_tokens"], row["saved_s"]) == (7.0, 100, 2.0)
        assert row["verdict"] == "not_worth"
    assert merged["advice"] == ["one"]


def misses(cause: str, tokens: int, document: str) -> dict[str, Any]:
    by = {"pool": "p", "tenant": "", "model": "m", "document": document}
    return {
        "causes": [
            {
                "cause": cause, "segment": "system", "tokens_lost": tokens, "requests": 1,
                "share": 1.0, "advice": "a", "example": {"tokens_lost": tokens},
                "by": [{**by, "tokens_lost": tokens, "requests": 1}],
            }
        ],
        "totals": {"requests": 4, "tokens_lost": tokens, "window_s": tokens / 10},
    }  # fmt: skip


def test_misses_are_ranked_over_all_processes() -> None:
    merged = merge_misses(
        [misses("a", 100, "x"), misses("b", 150, "x"), misses("a", 250, "x"), misses("a", 50, "y")]
    )

    assert [(row["cause"], row["tokens_lost"]) for row in merged["causes"]] == [
        ("a", 400), ("b", 150)
    ]  # fmt: skip
    first = merged["causes"][0]
    assert first["example"] == {"tokens_lost": 250}
    assert [(g["document"], g["tokens_lost"], g["requests"]) for g in first["by"]] == [
        ("x", 350, 2), ("y", 50, 1)
    ]  # fmt: skip
    assert first["share"] == pytest.approx(400 / 550, abs=1e-4)
    assert merged["totals"] == {"requests": 16, "tokens_lost": 550, "window_s": 25.0}
