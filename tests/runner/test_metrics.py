from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runner.metrics import WINDOW_S, RunnerMetrics
from runner.types import EngineStats

CAPTURE = Path(__file__).parents[1] / "data" / "vllm-metrics-0.32.0.txt"

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    pool_blocks=100,
    free_blocks=50,
    cached_blocks=30,
    active_blocks=20,
    block_size=16,
    block_bytes=1000,
    hit_tokens_total=64,
    query_tokens_total=200,
    evictions_total=5,
    preemptions_total=1,
    prompt_tokens_total=201,
    generation_tokens_total=77,
)
VLLM = {"model_name": "smollm2", "engine": "0"}
BARE = {"scope": "worker", "worker": "127.0.0.1:8101"}


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> RunnerMetrics:
    return RunnerMetrics(
        model="smollm2",
        worker="127.0.0.1:8101",
        stats=lambda: STATS,
        clock=clock,
        wall_clock=lambda: 1.75e9,
    )


def samples(metrics: RunnerMetrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def types(metrics: RunnerMetrics) -> dict[str, str]:
    lines = metrics.render().decode().splitlines()
    return {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm:num_requests_running", 3),
        ("vllm:num_requests_waiting", 2),
        ("vllm:kv_cache_usage_perc", 0.2),
        ("vllm:prefix_cache_queries_total", 200),
        ("vllm:prefix_cache_hits_total", 64),
        ("vllm:prompt_tokens_total", 201),
        ("vllm:generation_tokens_total", 77),
        ("vllm:num_preemptions_total", 1),
    ],
)
def test_vllm_names_carry_the_engine_figures(
    metrics: RunnerMetrics, name: str, value: float
) -> None:
    assert samples(metrics)[name] == [(VLLM, value)]


def test_the_cache_configuration_is_told_in_labels(metrics: RunnerMetrics) -> None:
    expected = {**VLLM, "block_size": "16", "num_gpu_blocks": "100"}

    assert samples(metrics)["vllm:cache_config_info"] == [(expected, 1)]


def test_finished_samples_count_by_reason_from_zero(metrics: RunnerMetrics) -> None:
    metrics.finished("stop")
    metrics.finished("stop")
    metrics.finished("abort")

    counts = {
        labels["finished_reason"]: value
        for labels, value in samples(metrics)["vllm:request_success_total"]
    }
    assert counts == {"stop": 2, "length": 0, "abort": 1, "error": 0}


def test_time_to_first_token_fills_vllms_buckets(metrics: RunnerMetrics) -> None:
    metrics.first_token(0.07, 10, 0)

    buckets = {
        labels["le"]: value
        for labels, value in samples(metrics)["vllm:time_to_first_token_seconds_bucket"]
    }
    assert (buckets["0.06"], buckets["0.08"], buckets["+Inf"]) == (0, 1, 1)
    assert samples(metrics)["vllm:time_to_first_token_seconds_sum"] == [(VLLM, 0.07)]


def test_bare_samples_carry_the_scope_and_their_values(metrics: RunnerMetrics) -> None:
    for ttft_s, cached in [(0.1, 0), (0.2, 32), (0.6, 64)]:
        metrics.first_token(ttft_s, 64, cached)

    found = samples(metrics)

    expected: dict[str, Any] = {
        "prefix_cache_hit_tokens": 64,
        "prefix_cache_miss_tokens": 136,
        "kv_cache_eviction_count": 5,
        "kv_cache_gpu_usage_bytes": 50_000,
        "prefix_cache_hit_rate": 0.5,
        "ttft_avg": pytest.approx(0.3),
        "ttft_p95": 0.6,
        "ttft_p99": 0.6,
    }
    assert {name: found[name] for name in expected} == {
        name: [(BARE, value)] for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("prefix_cache_hit_tokens", "untyped"),
        ("prefix_cache_miss_tokens", "untyped"),
        ("kv_cache_eviction_count", "untyped"),
        ("kv_cache_gpu_usage_bytes", "gauge"),
        ("ttft_p95", "gauge"),
        ("warmlane_runner_prefix_cache_hit_tokens_total", "counter"),
        ("warmlane_runner_ttft_seconds", "histogram"),
    ],
)
def test_types_are_those_of_the_contract(metrics: RunnerMetrics, name: str, kind: str) -> None:
    metrics.first_token(0.1, 64, 0)

    assert types(metrics)[name] == kind


def test_what_nobody_reports_is_absent(metrics: RunnerMetrics) -> None:
    found = samples(metrics)

    absent = {
        "kv_cache_cpu_usage_bytes",
        "kv_cache_offload_read_latency",
        "kv_cache_offload_write_latency",
        "gpu_stall_due_to_kv_restore",
        "prefix_cache_hit_rate",
        "ttft_avg",
        "ttft_p95",
        "ttft_p99",
    }
    assert not absent & found.keys()


def test_the_window_forgets_after_five_minutes(metrics: RunnerMetrics, clock: Clock) -> None:
    metrics.first_token(9.0, 64, 0)
    clock.now_s += WINDOW_S / 2
    metrics.first_token(1.0, 64, 0)
    clock.now_s += WINDOW_S / 2 + 1

    assert samples(metrics)["ttft_avg"] == [(BARE, 1.0)]

    clock.now_s += WINDOW_S

    assert "ttft_avg" not in samples(metrics)


@pytest.mark.parametrize(
    ("count", "p95", "p99"), [(1, 1, 1), (20, 19, 20), (100, 95, 99), (1000, 950, 990)]
)
def test_percentiles_are_nearest_ranks(
    metrics: RunnerMetrics, count: int, p95: float, p99: float
) -> None:
    for ttft in range(count, 0, -1):
        metrics.first_token(float(ttft), 1, 0)

    found = samples(metrics)

    assert (found["ttft_p95"], found["ttft_p99"]) == ([(BARE, p95)], [(BARE, p99)])


def test_start_time_is_an_epoch_mark(metrics: RunnerMetrics) -> None:
    assert samples(metrics)["process_start_time_seconds"] == [({}, 1.75e9)]


def test_an_engine_without_blocks_divides_by_nothing() -> None:
    metrics = RunnerMetrics(
        model="m", worker="w", stats=lambda: replace(STATS, pool_blocks=0, active_blocks=0)
    )

    assert samples(metrics)["vllm:kv_cache_usage_perc"][0][1] == 0


def test_vllm_names_have_the_types_labels_and_buckets_vllm_gives_them(
    metrics: RunnerMetrics,
) -> None:
    metrics.first_token(0.1, 64, 0)

    def described(text: str) -> dict[str, tuple[str, set[tuple[str, ...]]]]:
        return {
            family.name: (
                family.type,
                {
                    (sample.name, *sorted(sample.labels), sample.labels.get("le", ""))
                    for sample in family.samples
                },
            )
            for family in text_string_to_metric_families(text)
            if family.name.startswith("vllm:") and not family.name.endswith("_created")
        }

    ours = described(metrics.render().decode())
    theirs = described(CAPTURE.read_text())
    # vLLM's configuration has labels that mean nothing here; routers read these two.
    kind, info = ours.pop("vllm:cache_config_info")
    assert (kind, *info) == (
        "gauge",
        ("vllm:cache_config_info", "block_size", "engine", "model_name", "num_gpu_blocks", ""),
    )
    assert len(ours) >= 10
    assert {name: theirs[name] for name in ours} == ours
