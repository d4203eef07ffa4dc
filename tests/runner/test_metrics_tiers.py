from __future__ import annotations

import subprocess
import threading
from dataclasses import dataclass, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runner.metrics import WINDOW_S, RunnerMetrics, TransferMeter
from runner.tiers.types import TierName
from runner.types import EngineStats
from tests.runner.metrics_parts import STATS
from tests.tools import tool

BARE = {"scope": "worker", "worker": "127.0.0.1:8101"}
TYPED = {"model_name": "smollm2", "engine": "0"}


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Pulled:
    bytes: int = 10
    tokens: int = 20
    seconds: float = 0.5
    failed: int = 1


@dataclass
class Served:
    served_blocks: int = 3
    served_bytes: int = 3000
    refused: int = 2
    cut_short: int = 1


def made(
    stats: EngineStats = STATS, clock: Clock | None = None
) -> tuple[RunnerMetrics, TransferMeter]:
    clock = clock or Clock()
    meter = TransferMeter("smollm2", clock)
    metrics = RunnerMetrics(
        model="smollm2",
        worker="127.0.0.1:8101",
        stats=lambda: stats,
        transfers=meter,
        pulls=lambda: {"http://a:1": Pulled(), "http://b:1": Pulled(failed=0)},
        served=Served,
        clock=clock,
    )
    return metrics, meter


def busy() -> RunnerMetrics:
    """Everything there is has happened."""
    metrics, meter = made()
    for source in ("cold", "gpu", "cpu", "disk", "remote", "peer"):
        metrics.first_token(0.1, 64, 0 if source == "cold" else 48, source)
    for tier in ("cpu", "disk", "remote", "peer"):
        meter.transferred(tier, "read", 0.002, 1000)
    meter.transferred("disk", "write", 0.01, 1000)
    meter.gained(0.5, 0.4)
    metrics.finished("stop")
    return metrics


def found(metrics: RunnerMetrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by name and by the values of those labels that every sample does not have."""
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            own = tuple(
                value
                for label, value in sorted(sample.labels.items())
                if label not in {*BARE, *TYPED}
            )
            samples.setdefault(sample.name, {})[own] = sample.value
    return samples


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kv_cache_cpu_usage_bytes", {(): 48_000}),
        ("kv_cache_gpu_usage_bytes", {(): 49_000}),
        ("kv_cache_eviction_count", {(): 12}),
        ("gpu_stall_due_to_kv_restore", {(): 1.5}),
        (
            "warmlane_runner_prefix_cache_hit_tokens_total",
            {("gpu",): 32, ("cpu",): 48, ("disk",): 16},
        ),
        (
            "warmlane_runner_prefix_cache_miss_tokens_total",
            {
                ("cold",): 120,
                ("evicted",): 40,
                ("below_block",): 20,
                ("gated",): 16,
                ("failed",): 4,
            },
        ),
        (
            "warmlane_runner_kv_cache_usage_bytes",
            {("gpu",): 49_000, ("cpu",): 48_000, ("disk",): 100_000},
        ),
        (
            "warmlane_runner_kv_cache_capacity_bytes",
            {("gpu",): 100_000, ("cpu",): 64_000, ("disk",): 640_000},
        ),
        (
            "warmlane_runner_kv_cache_evictions_total",
            {
                ("room", "gpu"): 5,
                ("room", "cpu"): 7,
                ("damaged", "cpu"): 0,
                ("room", "disk"): 0,
                ("damaged", "disk"): 6,
            },
        ),
        (
            "warmlane_runner_kv_blocks",
            {("free",): 45, ("cached",): 25, ("active",): 20, ("loading",): 6, ("pinned",): 4},
        ),
        ("warmlane_runner_requests_loading", {(): 2}),
        ("warmlane_runner_restore_stall_seconds_total", {(): 1.5}),
        (
            "warmlane_tier_queue_bytes",
            {("read", "cpu"): 2000, ("write", "cpu"): 3000},
        ),
        (
            "warmlane_tier_oldest_seconds",
            {("read", "cpu"): 0.25, ("write", "cpu"): 0},
        ),
        (
            "warmlane_runner_transfer_bytes_total",
            {("read", "cpu"): 9000, ("write", "cpu"): 60_000, ("read", "remote"): 5},
        ),
        (
            "warmlane_runner_transfer_blocks_total",
            {("read", "cpu"): 9, ("write", "cpu"): 60},
        ),
        (
            "warmlane_runner_stores_dropped_total",
            {("cpu",): 2, ("disk",): 0, ("remote",): 0},
        ),
        (
            "warmlane_runner_stores_failed_total",
            {("cpu",): 0, ("disk",): 4, ("remote",): 0},
        ),
        (
            "warmlane_runner_damaged_blocks_total",
            {("cpu",): 0, ("disk",): 6, ("remote",): 0, ("peer",): 0},
        ),
        (
            "warmlane_runner_loads_failed_total",
            {("cpu",): 0, ("disk",): 8, ("remote",): 0, ("peer",): 2},
        ),
        (
            "warmlane_runner_restores_gated_total",
            {("cpu",): 0, ("disk",): 9, ("remote",): 0, ("peer",): 0},
        ),
        (
            "warmlane_runner_pins_orphaned_total",
            {("gpu",): 1, ("cpu",): 3, ("disk",): 0, ("remote",): 0, ("peer",): 0},
        ),
        (
            "warmlane_runner_tier_paused",
            {("cpu",): 0, ("disk",): 1, ("remote",): 0},
        ),
        ("warmlane_peer_pull_bytes_total", {("http://a:1",): 10, ("http://b:1",): 10}),
        ("warmlane_peer_pull_tokens_total", {("http://a:1",): 20, ("http://b:1",): 20}),
        ("warmlane_peer_pull_seconds_total", {("http://a:1",): 0.5, ("http://b:1",): 0.5}),
        ("warmlane_peer_pulls_failed_total", {("http://a:1",): 1, ("http://b:1",): 0}),
        ("warmlane_peer_served_blocks_total", {(): 3}),
        ("warmlane_peer_served_bytes_total", {(): 3000}),
        ("warmlane_peer_refused_total", {(): 2}),
        ("warmlane_peer_cut_short_total", {(): 1}),
    ],
)
def test_figures_of_tiers_and_peers_are_shown(
    name: str, expected: dict[tuple[str, ...], float]
) -> None:
    assert found(made()[0])[name] == expected


def test_without_lower_tiers_nothing_is_said_of_them() -> None:
    bare = replace(STATS, tiers=(), hit_tokens={"gpu": 96}, num_loading=0, loading_blocks=0)
    metrics = RunnerMetrics(model="smollm2", worker="w", stats=lambda: bare)
    metrics.first_token(0.1, 64, 0)

    names = set(found(metrics))

    told = {name for name in names if "tier_" in name or "transfer" in name or "peer" in name}
    assert not told
    assert not names & {
        "kv_cache_cpu_usage_bytes",
        "kv_cache_offload_read_latency",
        "kv_cache_offload_write_latency",
        "gpu_stall_due_to_kv_restore",
        "warmlane_runner_restore_stall_seconds_total",
        "warmlane_runner_reuse_gain_actual_seconds_total",
        "warmlane_runner_requests_loading",
    }
    assert found(metrics)["warmlane_runner_kv_cache_usage_bytes"].keys() == {("gpu",)}


def test_hits_and_misses_by_place_add_up_to_what_the_contract_counts() -> None:
    # Counted by an engine that does not tell them apart.
    plain = replace(STATS, hit_tokens={"disk": 16}, miss_tokens={"gated": 50})
    samples = found(made(plain)[0])

    assert samples["warmlane_runner_prefix_cache_hit_tokens_total"] == {
        ("disk",): 16,
        ("gpu",): 80,
    }
    assert samples["warmlane_runner_prefix_cache_miss_tokens_total"] == {
        ("gated",): 50,
        ("unknown",): 150,
    }


def test_offload_latencies_are_means_of_the_window_over_all_tiers() -> None:
    clock = Clock()
    metrics, meter = made(clock=clock)
    meter.transferred("disk", "read", 8.0, 1)
    clock.now_s += WINDOW_S + 1
    meter.transferred("disk", "read", 0.2, 1)
    meter.transferred("cpu", "read", 0.1, 1)

    samples = found(metrics)

    assert samples["kv_cache_offload_read_latency"] == {(): pytest.approx(0.15)}
    assert "kv_cache_offload_write_latency" not in samples
    clock.now_s += WINDOW_S + 1
    assert "kv_cache_offload_read_latency" not in found(metrics)


def test_transfer_times_have_a_histogram_by_tier_and_direction() -> None:
    metrics, meter = made()
    meter.transferred("disk", "read", 0.002, 1)
    meter.transferred("disk", "read", 0.2, 1)
    meter.transferred("cpu", "write", 0.0002, 1)

    samples = found(metrics)

    name = "warmlane_runner_transfer_seconds"
    assert samples[f"{name}_count"] == {("read", "disk"): 2, ("write", "cpu"): 1}
    assert samples[f"{name}_sum"][("read", "disk")] == pytest.approx(0.202)
    assert samples[f"{name}_bucket"][("read", "0.0025", "disk")] == 1


def test_time_to_first_token_is_told_by_where_the_prefix_came_from() -> None:
    metrics, _ = made()
    metrics.first_token(0.5, 64, 0)
    metrics.first_token(0.1, 64, 48)
    metrics.first_token(0.2, 64, 48, "disk")
    metrics.first_token(0.3, 64, 48, "peer")

    counts = found(metrics)["warmlane_runner_ttft_seconds_count"]

    assert counts == {("cold",): 1, ("gpu",): 1, ("disk",): 1, ("peer",): 1}
    assert found(metrics)["vllm:time_to_first_token_seconds_count"] == {(): 4}


def test_gains_and_losses_are_counted_apart_since_counters_only_grow() -> None:
    metrics, meter = made()
    meter.gained(2.0, 1.5)
    meter.gained(1.0, -0.25)

    samples = found(metrics)

    assert samples["warmlane_runner_reuse_gain_predicted_seconds_total"] == {(): 3.0}
    assert samples["warmlane_runner_reuse_gain_actual_seconds_total"] == {(): 1.5}
    assert samples["warmlane_runner_reuse_loss_actual_seconds_total"] == {(): 0.25}


def test_any_thread_may_report_while_another_renders() -> None:
    metrics, meter = made()
    tiers: tuple[TierName, ...] = ("cpu", "disk", "remote", "peer")

    def report(tier: TierName) -> None:
        for _ in range(500):
            meter.transferred(tier, "read", 0.001, 1)
            meter.gained(0.001, 0.001)

    threads = [threading.Thread(target=report, args=(tier,)) for tier in tiers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.render()
    for thread in threads:
        thread.join()

    samples = found(metrics)
    assert set(samples["warmlane_runner_transfer_seconds_count"].values()) == {500}
    actual_s = samples["warmlane_runner_reuse_gain_actual_seconds_total"][()]
    assert actual_s == pytest.approx(2.0)


def test_nothing_of_a_request_is_in_a_label() -> None:
    labels = {
        label
        for family in text_string_to_metric_families(busy().render().decode())
        for sample in family.samples
        for label in sample.labels
    }

    assert labels <= {
        *("model_name", "engine", "scope", "worker", "le", "tier", "direction", "reason"),
        *("state", "source", "finished_reason", "block_size", "num_gpu_blocks"),
    }


def test_the_text_can_be_parsed_and_every_family_has_help_and_one_type() -> None:
    families = list(text_string_to_metric_families(busy().render().decode()))

    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families)
    assert len(families) > 40


def test_promtool_complains_of_nothing_but_the_colon_in_vllms_names() -> None:
    checked = subprocess.run(
        [tool("promtool"), "check", "metrics"],
        input=busy().render(),
        capture_output=True,
        timeout=60,
        check=False,
    )

    complaints = [
        line
        for line in (checked.stdout + checked.stderr).decode().splitlines()
        if not (line.startswith("vllm:") and line.endswith("should not contain ':'"))
    ]
    assert not complaints
