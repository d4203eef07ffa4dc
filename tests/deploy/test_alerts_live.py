"""Alerts from end to end: a real Prometheus watches a live fleet of which a part is broken."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import observed_fleet as parts
from tests.deploy.alert_parts import RULES, rules
from tests.deploy.observed_fleet import ObservedFleet
from tests.e2e.fleet import wait_for

# Two runners start, one of them twice, on a machine that may be busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
DEADLINE_S = 120.0
# Minutes become seconds and hours minutes. All durations alike, so that what the rules mean stays:
# with a reading every half second instead of every 30 s, a window has as many samples as in use.
UNITS = {"m": "s", "h": "m", "d": "h"}
_WINDOW = re.compile(r"(?<=\[)(\d+)([mhd])(?=\])|(?<=offset )(\d+)([mhd])\b")


def _shorter(duration: re.Match[str]) -> str:
    number, unit = (part for part in duration.groups() if part)
    return f"{number}{UNITS[unit]}"


def shortened(text: str) -> dict[str, Any]:
    """Return the rules with every ``for``, window and offset a sixtieth as long (a day: a 24th)."""
    document: dict[str, Any] = yaml.safe_load(text)
    for group in document["groups"]:
        for rule in group["rules"]:
            rule["expr"] = _WINDOW.sub(_shorter, rule["expr"])
            if "for" in rule:
                rule["for"] = rule["for"][:-1] + UNITS[rule["for"][-1]]
    return document


@pytest.fixture(scope="module")
def fleet(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedFleet]:
    folder = tmp_path_factory.mktemp("alerts")
    path = folder / "shortened.yaml"
    path.write_text(yaml.safe_dump(shortened(RULES.read_text())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "RULES", path)
        with parts.observed_fleet(folder, smollm2_dir) as running:
            yield running


def states(fleet: ObservedFleet, name: str, **labels: str) -> dict[str, str]:
    """Return the alerts of that name that are active now: severity -> state."""
    found = {}
    for alert in fleet.prometheus.get("alerts")["alerts"]:
        said = alert["labels"]
        if said["alertname"] == name and labels.items() <= said.items():
            found[said["severity"]] = alert["state"]
    return found


def was(fleet: ObservedFleet, name: str, state: str, since_s: float) -> bool:
    """Whether an evaluation since then found the alert in that state."""
    window = f"{round(1000 * (time.time() - since_s))}ms"
    expr = f'last_over_time(ALERTS{{alertname="{name}", alertstate="{state}"}}[{window}])'
    return bool(fleet.prometheus.query(expr))


def wait_for_firing(fleet: ObservedFleet, name: str, since_s: float, **labels: str) -> None:
    wait_for(
        lambda: "firing" in states(fleet, name, **labels).values(),
        f"{name} fires",
        deadline_s=DEADLINE_S,
    )
    # It was not believed at once: the rule waits.
    assert was(fleet, name, "pending", since_s)


def wait_for_quiet(fleet: ObservedFleet, name: str, **labels: str) -> None:
    wait_for(lambda: not states(fleet, name, **labels), f"{name} is over", deadline_s=DEADLINE_S)


def test_only_durations_are_shortened() -> None:
    changed = [rule for group in shortened(RULES.read_text())["groups"] for rule in group["rules"]]
    duration = re.compile(r"(?<=\[)\w+(?=\])|(?<=offset )\w+")
    for rule, short in zip(rules(), changed, strict=True):
        assert duration.sub("", rule["expr"]) == duration.sub("", short["expr"])
        assert len(duration.findall(rule["expr"])) == len(duration.findall(short["expr"]))
        assert {k: v for k, v in rule.items() if k not in ("expr", "for")} == {
            k: v for k, v in short.items() if k not in ("expr", "for")
        }
    text = yaml.safe_dump(changed)
    assert re.search(r"\[5s\]", text)
    assert re.search(r"offset 15s", text)
    assert not re.search(r"\[\d+d\]|for: \d+[mh]", text)


def test_a_healthy_fleet_is_quiet(fleet: ObservedFleet) -> None:
    for name in ("WarmlaneWorkerEjected", "WarmlaneTargetDown", "WarmlaneRedisAway"):
        wait_for_quiet(fleet, name)
    health = fleet.prometheus.get("rules")["groups"]
    assert {rule["health"] for group in health for rule in group["rules"]} == {"ok"}


def test_a_killed_worker_is_told_and_is_over_when_it_is_back(fleet: ObservedFleet) -> None:
    broken_s = time.time()
    victim = fleet.runners[1]
    victim.kill()
    try:
        wait_for_firing(fleet, "WarmlaneWorkerEjected", broken_s, pool="chat", worker="w1")
        where = f"127.0.0.1:{victim.port}"
        wait_for_firing(fleet, "WarmlaneTargetDown", broken_s, instance=where)
        # Only what is broken: the other worker serves, and Redis is there.
        assert not states(fleet, "WarmlaneWorkerEjected", worker="w0")
        for name in ("WarmlanePoolUnavailable", "WarmlaneRedisAway"):
            assert not was(fleet, name, "firing", broken_s)
    finally:
        victim.start()
        victim.wait_ready()
    wait_for_quiet(fleet, "WarmlaneWorkerEjected")
    wait_for_quiet(fleet, "WarmlaneTargetDown", instance=where)


def test_a_killed_redis_is_told_and_is_over_when_it_is_back(fleet: ObservedFleet) -> None:
    broken_s = time.time()
    fleet.valkey.stop()
    try:
        wait_for_firing(fleet, "WarmlaneRedisAway", broken_s)
        (row,) = fleet.prometheus.query('ALERTS{alertname="WarmlaneRedisAway"}')
        assert row["metric"]["severity"] == "warning"
        assert not was(fleet, "WarmlaneWorkerEjected", "firing", broken_s)
    finally:
        fleet.valkey.start()
    wait_for_quiet(fleet, "WarmlaneRedisAway")
