"""The reference of all metrics is that of the code, and every name keeps the conventions."""

from __future__ import annotations

import re

import pytest

from deploy.reference.metrics import Row, gateway_metrics, page, rows, runner_metrics
from deploy.reference.pages import FOLDER

TWELVE = {
    *("prefix_cache_hit_rate", "ttft_avg", "ttft_p95", "ttft_p99"),
    *("kv_cache_gpu_usage_bytes", "kv_cache_cpu_usage_bytes"),
    *("kv_cache_offload_read_latency", "kv_cache_offload_write_latency"),
    *("prefix_cache_hit_tokens", "prefix_cache_miss_tokens"),
    *("kv_cache_eviction_count", "gpu_stall_due_to_kv_restore"),
}
CUMULATIVE = {
    *("prefix_cache_hit_tokens", "prefix_cache_miss_tokens"),
    *("kv_cache_eviction_count", "gpu_stall_due_to_kv_restore"),
}
# Base units, as the last word of a gauge or histogram or before a counter's ``_total``.
OWN = re.compile(r"warmlane_[a-z0-9_]+")
PRIVATE = {"request_id", "user", "document", "session", "prompt", "key", "text"}


def everything() -> list[Row]:
    return [*rows(gateway_metrics()), *rows(runner_metrics())]


def test_the_page_is_current() -> None:
    assert (FOLDER / "metrics.md").read_text() == page(), "run python -m deploy.reference"


@pytest.mark.parametrize("exporter", [gateway_metrics, runner_metrics])
def test_the_twelve_names_are_there_with_their_types(exporter) -> None:
    found = {row.name: row for row in rows(exporter())}

    assert found.keys() >= TWELVE
    for name in TWELVE:
        assert found[name].kind == ("untyped" if name in CUMULATIVE else "gauge")
        assert found[name].labels == ("scope", "worker")


def test_names_are_ours_or_an_engines_and_say_what_they_mean() -> None:
    for row in everything():
        is_known = row.name in TWELVE or row.name.startswith(("process_", "vllm:"))
        assert is_known or OWN.fullmatch(row.name), row
        assert row.text, row
        assert (row.kind == "counter") == row.name.endswith("_total"), row
        assert not row.name.endswith(("_ms", "_milliseconds", "_kb", "_mb", "_percent")), row


def test_no_label_is_made_for_what_clients_choose() -> None:
    for row in everything():
        assert not PRIVATE & set(row.labels), row
