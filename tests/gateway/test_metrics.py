"""The gateway's own families: formats, exemplars, hits by length, engine state, departures."""

from __future__ import annotations

import asyncio
import subprocess
import time
from typing import Any

import aiohttp
import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry import exposition
from gateway.telemetry.by_hit import HIT_SHARES, PROMPT_LENGTHS
from gateway.telemetry.exposition import OPEN_TYPE, TEXT_TYPE, wants_open_metrics
from gateway.telemetry.lag import EVERY_S
from gateway.telemetry.parts import PART_SAMPLES
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.requests import Telemetry
from tests.fakes.engine import RawEngine, answer
from tests.gateway.tenancy_parts import CHAT, T1, asking, bearer, respond, serving
from tests.support import poll_until
from tests.tools import tool

# What Prometheus 2.42 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
TRACE = "0af7651916cd43dd8448eb211c80319c"
CAPACITY = 160 * 16
# A worker that reports what there is to report.
TOLD = f"""
vllm:cache_config_info{{block_size="16",num_gpu_blocks="{CAPACITY // 16}"}} 1
vllm:num_requests_running 2
vllm:num_requests_waiting 5
vllm:kv_cache_usage_perc 0.75
kv_cache_gpu_usage_bytes 1000
kv_cache_cpu_usage_bytes 2000
kv_cache_eviction_count 7
gpu_stall_due_to_kv_restore 1.5
kv_cache_offload_read_latency 0.25
kv_cache_offload_write_latency 0.5
"""


def record(**more: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "pool": "p", "worker": "w0", "outcome": "ok", "reason": "longest_prefix", "attempts": 1,
        "prompt_tokens": 1000, "observed_hit_tokens": 500, "ttft_s": 0.3, "duration_s": 2.0,
    }  # fmt: skip
    return RequestRecord("r", "chat", **(values | more))


def values_of(text: str, name: str) -> dict[tuple[str, ...], float]:
    """Values of one sample name by its labels' values, pool and worker first."""
    first = ("pool", "worker", "prompt_length")
    return {
        tuple(
            value
            for _, value in sorted(
                sample.labels.items(),
                key=lambda pair: first.index(pair[0]) if pair[0] in first else len(first),
            )
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def complaints(text: bytes) -> bytes:
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text, capture_output=True, check=False
    )
    return done.stdout + done.stderr


async def test_a_live_gateways_metrics_satisfy_promtool() -> None:
    def told(seen: Any) -> Any:
        return answer(TOLD.encode()) if seen.target == "/metrics" else respond(seen)

    async with (
        RawEngine(told) as engine,
        serving(engine, tenants=[T1 | {"key_env": None, "requests_per_min": 9}]) as gw,
    ):
        await gw.post(CHAT, asking(), bearer("any"))
        gw.gateway.observing.onlookers.observe(record(pool="chat", trace_id=TRACE))
        watch = gw.gateway.fleet.watches["w0"]
        await poll_until(lambda: watch.scrape.kv_usage is not None)
        async with gw.session.get(gw.url + "/metrics") as response:
            assert response.headers["content-type"] == TEXT_TYPE
            text = await response.read()
        accept = {"accept": PROMETHEUS}
        async with gw.session.get(gw.url + "/metrics", headers=accept) as response:
            assert response.headers["content-type"] == OPEN_TYPE
            opened = await response.text()

    assert await asyncio.to_thread(complaints, text) == b""
    families = {family.name for family in open_metrics_families(opened)}
    plain = {f.name.removesuffix("_total") for f in text_string_to_metric_families(text.decode())}
    assert families == plain
    assert {"warmlane_build_info", "process_cpu_seconds", "warmlane_worker_kv_bytes"} <= families


def test_only_who_asks_for_it_gets_open_metrics() -> None:
    assert wants_open_metrics(PROMETHEUS)
    for accept in ("", "*/*", "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"):
        assert not wants_open_metrics(accept)


def test_traced_requests_leave_their_trace_in_the_buckets_they_fell_into() -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    telemetry.observe(record(trace_id=TRACE))
    telemetry.observe(record(ttft_s=3.0))

    found = {
        (family.name, sample.labels["le"]): sample.exemplar
        for family in open_metrics_families(telemetry.render(open_metrics=True).decode())
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert {key: exemplar.labels for key, exemplar in found.items()} == {
        ("warmlane_ttft_seconds", "0.5"): {"trace_id": TRACE},
        ("warmlane_ttft_by_hit_seconds", "0.5"): {"trace_id": TRACE},
        ("warmlane_request_duration_seconds", "2.5"): {"trace_id": TRACE},
    }
    assert TRACE not in telemetry.render().decode()


@pytest.mark.parametrize(
    ("prompt", "hit", "labels"),
    [
        (511, 0, ("lt_512", "0")),
        (512, 1, ("lt_2k", "lt_50")),
        (8191, 4095, ("lt_8k", "lt_50")),
        (8192, 4096, ("lt_32k", "lt_90")),
        (32767, 29490, ("lt_32k", "lt_90")),
        (32768, 29492, ("ge_32k", "ge_90")),
        (100, 100, ("lt_512", "ge_90")),
    ],
)
def test_prefill_is_counted_by_hit_share_within_prompt_lengths(
    prompt: int, hit: int, labels: tuple[str, str]
) -> None:
    assert labels[0] in PROMPT_LENGTHS
    assert labels[1] in HIT_SHARES
    telemetry = Telemetry(clock=lambda: 5.0)
    telemetry.observe(
        record(prompt_tokens=prompt, observed_hit_tokens=hit, queue_s=0.1, route_s=0.05)
    )
    text = telemetry.render().decode()

    at = ("p", *labels)
    assert values_of(text, "warmlane_ttft_by_hit_seconds_sum") == {at: pytest.approx(0.3)}
    # What it waited in the gateway no prefill took.
    assert values_of(text, "warmlane_prefill_by_hit_seconds_sum") == {at: pytest.approx(0.15)}
    assert values_of(text, "warmlane_prompt_tokens_by_hit_total") == {at: prompt}


@pytest.mark.parametrize("unknown", ["observed_hit_tokens", "ttft_s", "prompt_tokens"])
def test_what_is_not_known_is_in_no_class(unknown: str) -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    telemetry.observe(record(**{unknown: 0 if unknown == "prompt_tokens" else None}))

    assert values_of(telemetry.render().decode(), "warmlane_prompt_tokens_by_hit_total") == {}


async def test_a_workers_figures_have_typed_twins_and_leave_with_it() -> None:
    def told(seen: Any) -> Any:
        return answer(TOLD.encode()) if seen.target == "/metrics" else respond(seen)

    async with (
        RawEngine(told) as full,
        RawEngine(respond) as silent,
        serving(full, silent) as gw,
    ):
        fleet, telemetry = gw.gateway.fleet, gw.gateway.telemetry
        await poll_until(lambda: fleet.watches["w0"].scrape.kv_usage is not None)
        await poll_until(lambda: fleet.watches["w1"].checked.is_set())
        for worker in ("w0", "w1"):
            gw.gateway.observing.onlookers.observe(
                record(pool="chat", worker=worker, completion_tokens=24, source="store",
                       pull_tokens=9, predicted_ttft_s=0.1)
            )  # fmt: skip
        text = telemetry.render().decode()
        fleet.remove("w0")
        await poll_until(lambda: "w0" not in telemetry.workers)
        after = telemetry.render().decode()
        silent_only = values_of(after, "warmlane_prompt_tokens_total")

    at = ("chat", "w0")
    for name, expected in {
        "warmlane_worker_running_requests": {at: 2},
        "warmlane_worker_waiting_requests": {at: 5},
        "warmlane_worker_kv_usage_ratio": {at: 0.75},
        "warmlane_worker_kv_bytes": {(*at, "gpu"): 1000, (*at, "cpu"): 2000},
        "warmlane_worker_evictions_total": {at: 7},
        "warmlane_worker_restore_stall_seconds_total": {at: 1.5},
        "warmlane_worker_offload_seconds": {(*at, "read"): 0.25, (*at, "write"): 0.5},
        # A quarter of the memory, for requests of 1024 tokens.
        "warmlane_batch_headroom_requests": {at: CAPACITY / 4 / 1024},
    }.items():
        assert values_of(text, name) == expected, name
    assert values_of(text, "warmlane_computed_prompt_tokens_total") == {
        at: 500,
        ("chat", "w1"): 500,
    }
    assert '"w0"' in text
    assert '"w0"' not in after
    assert silent_only == {("chat", "w1"): 1000}


async def test_a_worker_that_does_not_answer_has_no_figures_any_more() -> None:
    def told(seen: Any) -> Any:
        return answer(TOLD.encode()) if seen.target == "/metrics" else respond(seen)

    async with RawEngine(told) as engine, serving(engine) as gw:
        watch = gw.gateway.fleet.watches["w0"]
        await poll_until(lambda: watch.scrape.kv_usage is not None)
        await engine.__aexit__(None, None, None)
        await poll_until(lambda: watch.scrape.kv_usage is None)
        text = gw.gateway.telemetry.render().decode()

    for name in ("warmlane_worker_kv_usage_ratio", "warmlane_worker_kv_bytes"):
        assert values_of(text, name) == {}
    assert values_of(text, "kv_cache_gpu_usage_bytes") == {}


async def test_a_loop_that_stands_still_is_seen_in_its_lag() -> None:
    telemetry = Telemetry()

    def late(bound: str) -> float:
        text = telemetry.render().decode()
        return values_of(text, "warmlane_event_loop_lag_seconds_bucket")[bound,]

    task = asyncio.create_task(telemetry.lag.run())
    await asyncio.sleep(EVERY_S / 2)
    time.sleep(4 * EVERY_S)  # noqa: ASYNC251  # the fault that is looked for
    await poll_until(lambda: late("+Inf") >= 1)
    task.cancel()

    assert late("+Inf") > late("0.25")


async def test_others_run_while_many_series_are_written() -> None:
    """One part after the other: the longest wait is for a part, not for all of them."""
    telemetry = Telemetry(clock=lambda: 5.0)
    for worker in range(60):
        telemetry.observe(record(worker=f"w{worker}"))
    parts = list(telemetry.registry.collect())
    assert max(len(part.samples) for part in parts) <= PART_SAMPLES

    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    in_slices = await telemetry.render_in_slices()
    task.cancel()

    assert turns >= 2
    without_process = [
        [line for line in text.splitlines() if b"process_" not in line]
        for text in (in_slices, telemetry.render())
    ]
    assert without_process[0] == without_process[1]


def test_parts_of_a_family_have_one_head() -> None:
    parts = [Metric("x", 'what "x"\nis', "gauge") for _ in range(3)]
    for number, part in enumerate(parts):
        part.add_sample("x", {"a": f'{number}"\\\n'}, number)

    lines = "".join(exposition.write(parts, open_metrics=False)).splitlines()
    assert lines == [
        '# HELP x what "x"\\nis', "# TYPE x gauge",
        'x{a="0\\"\\\\\\n"} 0.0', 'x{a="1\\"\\\\\\n"} 1.0', 'x{a="2\\"\\\\\\n"} 2.0',
    ]  # fmt: skip


async def test_the_metrics_of_a_stranger_are_refused_nowhere_and_say_nothing_of_clients() -> None:
    """Whoever may scrape learns names of pools and workers, and nothing that clients sent."""
    async with RawEngine(respond) as engine, serving(engine) as gw:
        await gw.post(CHAT, asking("CANARY-TEXT", user="CANARY-USER"), bearer("CANARY-KEY"))
        async with aiohttp.request("GET", gw.url + "/metrics") as response:
            assert "CANARY" not in await response.text()
