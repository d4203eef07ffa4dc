"""Every alert that the gateway judges itself: made to hold, waited for, and cured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.console.alerts import ELSEWHERE, JUDGED
from gateway.console.history import SAMPLE_EVERY_S, History
from gateway.console.thresholds import ERROR_RATIO_MIN_REQUESTS
from gateway.serve import Gateway
from gateway.telemetry.record import RequestRecord
from tests.gateway.console_parts import consoled

Cure = Callable[[], object]
Break = Callable[[Gateway], Cure]


def worker(gateway: Gateway) -> Any:
    return gateway.fleet.pools[0].workers["w0"]


def no_worker_ready(gateway: Gateway) -> Cure:
    workers = gateway.fleet.pools[0].workers.values()
    for found in workers:
        found.health.ready = False
    return lambda: [setattr(found.health, "ready", True) for found in workers]


def requests_fail(gateway: Gateway) -> Cure:
    decisions = gateway.observing.console.decisions
    for number in range(2 * ERROR_RATIO_MIN_REQUESTS):
        outcome = "upstream_error" if number % 10 == 0 else "ok"
        decisions.add(0.0, RequestRecord(f"r{number}", "chat", pool="chat", outcome=outcome))
    return lambda: None


def queue_refuses(gateway: Gateway) -> Cure:
    gateway.dispatcher.gate.num_full["chat"] += 3
    return lambda: None


def breaker_opens(gateway: Gateway) -> Cure:
    for _ in range(3):
        worker(gateway).health.failed(time.monotonic())
    return lambda: worker(gateway).health.succeeded(time.monotonic())


def loop_lags(gateway: Gateway) -> Cure:
    recent = gateway.telemetry.lag.recent
    # Until the alert's wait is over.
    for ahead_s in range(0, 300, 10):
        for _ in range(100):
            recent.add(0.2, time.monotonic() + ahead_s)
    return lambda: None


def redis_leaves(gateway: Gateway) -> Cure:
    assert gateway.link is not None
    gateway.link.is_up = False
    return lambda: setattr(gateway.link, "is_up", True)


def tokens_differ(gateway: Gateway) -> Cure:
    gateway.fleet.parities.clear()
    worker(gateway).parity = 0
    return lambda: setattr(worker(gateway), "parity", 1)


def events_get_lost(gateway: Gateway) -> Cure:
    subscriber = gateway.fleet.feeds["w0"].subscriber
    subscriber.gaps += 1
    subscriber.losses += 1
    return lambda: None


def events_do_not_decode(gateway: Gateway) -> Cure:
    subscriber = gateway.fleet.feeds["w0"].subscriber
    subscriber.last_error_s = time.monotonic()
    return lambda: setattr(subscriber, "last_error_s", None)


def memory_fills(gateway: Gateway) -> Cure:
    scrape = gateway.fleet.watches["w0"].scrape
    scrape.kv_usage = 0.93
    return lambda: setattr(scrape, "kv_usage", 0.4)


def reload_fails(gateway: Gateway) -> Cure:
    console = gateway.observing.console
    console.is_reloaded = lambda: False
    return lambda: setattr(console, "is_reloaded", lambda: True)


def discovery_fails(gateway: Gateway) -> Cure:
    listing = gateway.discovery.listings["chat"]
    listing.failed("gone")
    return lambda: listing.told(listing.found or ())


def spans_are_dropped(gateway: Gateway) -> Cure:
    assert gateway.observing.tracing is not None
    gateway.observing.tracing.export.dropped += 5
    return lambda: None


BREAKS: dict[str, Break] = {
    "WarmlanePoolUnavailable": no_worker_ready,
    "WarmlaneErrorRatioHigh": requests_fail,
    "WarmlaneQueueRefusing": queue_refuses,
    "WarmlaneWorkerEjected": breaker_opens,
    "WarmlaneEventLoopLag": loop_lags,
    "WarmlaneRedisAway": redis_leaves,
    "WarmlaneParityDiverged": tokens_differ,
    "WarmlaneIndexGap": events_get_lost,
    "WarmlaneIndexStale": events_do_not_decode,
    "WarmlaneCacheFull": memory_fills,
    "WarmlaneConfigReloadFailed": reload_fails,
    "WarmlaneDiscoveryStale": discovery_fails,
    "WarmlaneTracesLost": spans_are_dropped,
}


def test_every_alert_is_broken_once() -> None:
    assert set(BREAKS) == set(JUDGED)
    assert not set(JUDGED) & set(ELSEWHERE)


@pytest.mark.parametrize("name", BREAKS)
async def test_an_alert_waits_fires_and_ends(name: str, tmp_path: Path) -> None:
    found = tmp_path / "workers.yaml"
    found.write_text("[]")
    pool: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    if name in ("WarmlaneIndexGap", "WarmlaneIndexStale"):
        pool = {
            "workers": [{"id": "w0", "url": "http://127.0.0.1:9", "kv_events": "tcp://127.0.0.1:9"}]
        }
    elif name == "WarmlaneDiscoveryStale":
        pool = {"discovery": {"type": "file", "path": str(found)}}
    elif name == "WarmlaneRedisAway":
        sections = {"index": {"backend": "redis", "url": "redis://127.0.0.1:9"}}
    elif name == "WarmlaneTracesLost":
        sections = {"telemetry": {"otlp_endpoint": "http://127.0.0.1:9", "trace_sample": 0}}
    async with consoled(tmp_path, pool=pool, **sections) as running:
        gateway, threshold = running.gateway, JUDGED[name]
        alerts = gateway.observing.console.alerts
        if name == "WarmlaneRedisAway":
            assert gateway.link is not None
            gateway.link.is_up = True

        def state(at_s: float) -> str:
            alerts.look(at_s)
            rows = [row for row in alerts.report(at_s)["active"] if row["alert"] == name]
            assert len(rows) <= 1
            assert all(row["why"] and row["runbook"] == f"docs/runbooks/{name}.md" for row in rows)
            return rows[0]["state"] if rows else ""

        now_s = time.monotonic()
        assert state(now_s) == ""
        cure = BREAKS[name](gateway)
        begun_s = now_s + 1.0
        assert state(begun_s) == ("pending" if threshold.for_s else "firing")
        if threshold.for_s:
            assert state(begun_s + threshold.for_s - 1.0) == "pending"
        assert state(begun_s + threshold.for_s) == "firing"
        cure()
        # What grew within the window is forgotten once the window is over.
        end_s = begun_s + threshold.for_s
        for step in range(1, int(threshold.window_s / SAMPLE_EVERY_S) + 4):
            last = state(end_s + step * SAMPLE_EVERY_S)
        assert last == ""


async def test_a_pause_begins_the_wait_anew(tmp_path: Path) -> None:
    async with consoled(tmp_path) as running:
        alerts, now_s = running.gateway.observing.console.alerts, time.monotonic()

        def is_pending(at_s: float) -> bool:
            alerts.look(at_s)
            (row,) = alerts.report(at_s)["active"]
            return bool(row["state"] == "pending")

        cure = tokens_differ(running.gateway)
        assert is_pending(now_s)
        assert not is_pending(now_s + 70.0)
        cure()
        alerts.look(now_s + 75.0)
        assert alerts.report(now_s + 75.0)["active"] == []
        tokens_differ(running.gateway)
        assert is_pending(now_s + 80.0)


async def test_a_few_failures_at_night_are_no_alert(tmp_path: Path) -> None:
    async with consoled(tmp_path) as running:
        console = running.gateway.observing.console
        for number in range(ERROR_RATIO_MIN_REQUESTS - 1):
            failed = RequestRecord(f"r{number}", "chat", pool="chat", outcome="failed")
            console.decisions.add(0.0, failed)
        now_s = time.monotonic() + 1.0
        console.alerts.look(now_s)
        assert console.alerts.report(now_s)["active"] == []
        assert console.alerts.recent("chat", now_s) == (19, 19)


async def test_who_joins_late_has_lost_nothing(tmp_path: Path) -> None:
    workers = [{"id": "w0", "url": "http://127.0.0.1:9", "kv_events": "tcp://127.0.0.1:9"}]
    async with consoled(tmp_path, pool={"workers": workers}) as running:
        alerts, now_s = running.gateway.observing.console.alerts, time.monotonic()
        alerts.look(now_s)
        running.gateway.fleet.feeds["w0"].subscriber.losses += 1
        alerts.look(now_s + 1.0)
        assert "WarmlaneIndexGap" not in {
            row["alert"] for row in alerts.report(now_s + 1.0)["active"]
        }


def test_an_increase_is_that_of_its_window() -> None:
    history, key = History(), ("refused", "chat", "")
    for step in range(60):
        history.add(step * SAMPLE_EVERY_S, {key: float(step)})
    now_s = 59 * SAMPLE_EVERY_S
    assert history.increase(key, 59.0, 300.0, now_s) == 20.0
    # A process that began anew counts from nothing.
    assert history.increase(key, 3.0, 300.0, now_s) == 3.0
    assert history.increase(("refused", "new", ""), 4.0, 300.0, now_s) == 4.0
    assert len(history._samples) <= 600 / SAMPLE_EVERY_S + 2
