"""Reading a worker's metrics: the captured text of a real vLLM, and odd ones."""

from __future__ import annotations

from pathlib import Path

from gateway.fleet.scrape import Scrape, parse

VLLM = Path(__file__).parents[1] / "data" / "vllm-metrics-0.32.0.txt"


def test_a_real_vllm_tells_epoch_block_size_and_queue() -> None:
    scrape = parse(VLLM.read_text())

    assert scrape.epoch is not None
    assert scrape.epoch > 1_700_000_000
    assert scrape.block_size == 32
    assert scrape.capacity_tokens is not None
    assert scrape.capacity_tokens % 32 == 0
    assert (scrape.running, scrape.waiting) == (0.0, 0.0)
    assert scrape.values == {}
    assert scrape.kv_dtype == "auto"


def test_the_contract_names_of_a_runner_are_kept() -> None:
    text = 'kv_cache_gpu_usage_bytes{scope="worker"} 1024\nkv_cache_eviction_count 3\n'

    assert parse(text).values == {"kv_cache_gpu_usage_bytes": 1024, "kv_cache_eviction_count": 3}


def test_a_sglang_tells_its_queue_under_its_own_names() -> None:
    scrape = parse("sglang:num_running_reqs 2\nsglang:num_queue_reqs 3\n")

    assert (scrape.running, scrape.waiting) == (2, 3)


def test_ranks_are_added_up() -> None:
    text = 'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'

    assert parse(text).running == 5


def test_text_that_is_no_metrics_tells_nothing() -> None:
    for text in ("", "<html>", "process_start_time_seconds", "process_start_time_seconds x", "\0"):
        assert parse(text) == Scrape()
