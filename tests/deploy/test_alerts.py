"""The alerts by themselves: complete, tested both ways, explained, and the console's numbers."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from gateway.console import thresholds
from gateway.console.alerts import ELSEWHERE, JUDGED
from gateway.fleet.event_health import EventHealth
from gateway.routing.outcome import Outcome
from tests.deploy.alert_parts import (
    RULES,
    RUNBOOKS,
    TESTS,
    alerts,
    names,
    recorded_names,
    rules,
    selectors,
    unit_tests,
)
from tests.tools import tool

ALERTS = {f"{alert['alert']}-{alert['labels']['severity']}": alert for alert in alerts()}
every_alert = pytest.mark.parametrize("alert", ALERTS.values(), ids=ALERTS)
every_name = pytest.mark.parametrize("name", names())
UNITS_S = {"s": 1, "m": 60, "h": 3600}


def cases_of(name: str) -> list[dict[str, Any]]:
    return [case for case in unit_tests() if case["name"].split()[0] == name]


def seconds(duration: str) -> float:
    return int(duration[:-1]) * UNITS_S[duration[-1]]


def test_promtool_has_nothing_to_say_about_the_rules() -> None:
    command = [tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", RULES]

    checked = subprocess.run(command, capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_only_then(path: Any) -> None:
    command = [tool("promtool"), "test", "rules", path]

    tested = subprocess.run(command, capture_output=True, text=True, check=False)

    assert tested.returncode == 0, tested.stdout + tested.stderr


@every_name
def test_every_alert_is_tested_when_it_fires_and_when_it_is_near(name: str) -> None:
    fires = [
        any(check.get("exp_alerts") for check in case["alert_rule_test"]) for case in cases_of(name)
    ]
    assert True in fires
    assert False in fires
    for case in cases_of(name):
        assert {check["alertname"] for check in case["alert_rule_test"]} == {name}
        assert any("values" in series for series in case["input_series"])


@every_alert
def test_every_severity_of_an_alert_fires_in_a_test(alert: dict[str, Any]) -> None:
    expected = [
        row["exp_labels"]["severity"]
        for case in cases_of(alert["alert"])
        for check in case["alert_rule_test"]
        for row in check.get("exp_alerts", ())
    ]
    assert alert["labels"]["severity"] in expected


@every_alert
def test_every_alert_says_how_bad_what_and_where_to_read_on(alert: dict[str, Any]) -> None:
    notes = alert["annotations"]

    assert alert["labels"].keys() == {"severity"}
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert notes.keys() == {"summary", "description", "runbook_url"}
    assert notes["summary"].strip()
    assert notes["description"].strip().endswith((".", "end }}"))
    assert notes["runbook_url"] == f"docs/runbooks/{alert['alert']}.md"


@every_name
def test_every_alert_has_a_page_for_the_night(name: str) -> None:
    lines = (RUNBOOKS / f"{name}.md").read_text().splitlines()

    assert lines[0] == f"# {name}"
    assert [line for line in lines if line.startswith("## ")] == [
        *("## What users notice", "## First look", "## Likely causes", "## What to do"),
        "## It is over when",
    ]
    assert 15 <= len(lines) <= 40
    assert f"[{name}]({name}.md)" in (RUNBOOKS / "README.md").read_text()


def test_no_page_is_of_an_alert_that_is_no_more() -> None:
    assert {page.stem for page in RUNBOOKS.glob("*.md")} == {*names(), "README"}


def test_what_is_recorded_is_read_in_its_own_group() -> None:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        recorded = [rule["record"] for rule in group["rules"] if "record" in rule]
        read = {s.name for rule in group["rules"] for s in selectors(rule["expr"])}

        assert {name for name in read if ":" in name} == set(recorded)


def test_only_typed_names_are_read() -> None:
    read = {selector.name for rule in rules() for selector in selectors(rule["expr"])}

    assert {name for name in read - recorded_names() if not name.startswith("warmlane_")} == {
        *("ALERTS", "up")
    }


def test_nothing_is_made_up_where_nobody_reports() -> None:
    assert [rule for rule in rules() if "vector(" in rule["expr"]] == []


def test_the_console_names_the_same_alerts() -> None:
    assert sorted([*JUDGED, *ELSEWHERE]) == sorted(names())


@pytest.mark.parametrize("name", JUDGED)
def test_an_alert_that_the_console_judges_has_its_numbers(name: str) -> None:
    (alert,) = (alert for alert in alerts() if alert["alert"] == name)
    threshold, expr = JUDGED[name], alert["expr"]
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    windows = re.findall(r"\[(\w+)\]", expr + "".join(recorded[n] for n in recorded if n in expr))

    assert alert["labels"]["severity"] == threshold.severity
    assert seconds(alert.get("for", "0s")) == threshold.for_s
    assert {seconds(window) for window in windows} == ({threshold.window_s} - {0})
    if threshold.limit:
        assert re.search(rf"> {threshold.limit:g}\b", expr)
    else:
        assert re.search(r"> 0(?![.\d])|== [01]|unless", expr)


def test_the_console_counts_the_same_failures() -> None:
    (expr,) = (r["expr"] for r in rules() if r.get("record") == "pool:warmlane_errors:ratio5m")
    (counted,) = re.findall(r'outcome=~"([^"]*)"', expr)

    assert set(counted.split("|")) == thresholds.ERROR_OUTCOMES
    assert (
        f">= {thresholds.ERROR_RATIO_MIN_REQUESTS}"
        in ALERTS["WarmlaneErrorRatioHigh-critical"]["expr"]
    )


def test_every_outcome_is_a_failure_or_known_to_be_none() -> None:
    innocent = {Outcome.OK, Outcome.CLIENT_CLOSED, Outcome.REJECTED, Outcome.CANCELLED}

    assert {*Outcome} - thresholds.ERROR_OUTCOMES == innocent


@pytest.mark.parametrize("state", EventHealth)
def test_an_event_state_is_an_alert_where_events_are_not_believed(state: EventHealth) -> None:
    (matchers,) = {
        selector.matchers
        for alert in alerts()
        for selector in selectors(alert["expr"])
        if selector.name == "warmlane_kv_event_health"
    }
    (pattern,) = re.findall(r'state=~"(.*)"', matchers)
    is_well = state in (EventHealth.OFF, EventHealth.WAITING, EventHealth.OK)

    assert bool(re.fullmatch(pattern, state)) is not is_well
