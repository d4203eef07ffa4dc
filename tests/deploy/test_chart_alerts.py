"""Alerts as the chart's values make them: bounds, severities, labels, and those left out."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from tests.deploy.alert_parts import RULES, alerts, names, rules
from tests.deploy.chart_parts import CHART, of_kind, render
from tests.tools import tool

BOUNDS = yaml.safe_load((CHART / "alert-bounds.yaml").read_text())
CHANGED = {
    "errorRatio": 0.25,
    "ttftSeconds": 0.25,
    "ttftLateRatio": 0.002,
    "hitRateRatio": 0.55,
    "cacheFullRatio": 0.97,
}
# One request in eight fails; of a hundred first tokens one takes up to 5 s and one up to 10 s.
SERIES = [
    ('warmlane_requests_total{pool="chat", outcome="ok"}', "0+7x200"),
    ('warmlane_requests_total{pool="chat", outcome="truncated"}', "0+1x200"),
    ('warmlane_ttft_seconds_bucket{pool="chat", le="0.25"}', "0+98x200"),
    ('warmlane_ttft_seconds_bucket{pool="chat", le="5.0"}', "0+99x200"),
    ('warmlane_ttft_seconds_bucket{pool="chat", le="10.0"}', "0+100x200"),
    ('warmlane_ttft_seconds_count{pool="chat"}', "0+100x200"),
    ('warmlane_worker_kv_filled_ratio{pool="chat", worker="w0"}', "0.93x200"),
]


def groups(**said: Any) -> list[dict[str, Any]]:
    """Return the groups of the PrometheusRule that values make."""
    (rule,) = of_kind(
        render({"metrics": {"prometheusRule": {"enabled": True, **said}}}), "PrometheusRule"
    )
    made: list[dict[str, Any]] = rule["spec"]["groups"]
    return made


def rules_of(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for group in made for rule in group["rules"]]


def fires(folder: Path, made: list[dict[str, Any]], name: str) -> bool:
    """Whether an alert fires on ``SERIES`` after three hours, as promtool finds."""
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": made}))
    case = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in SERIES],
        "alert_rule_test": [{"eval_time": "3h", "alertname": name, "exp_alerts": []}],
    }
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (folder / "test.yaml").write_text(yaml.safe_dump(test))
    check = [
        tool("promtool"),
        "check",
        "rules",
        "--lint=all",
        "--lint-fatal",
        folder / "rules.yaml",
    ]
    subprocess.run(check, check=True, capture_output=True)
    command = [tool("promtool"), "test", "rules", folder / "test.yaml"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    # It expects none, and says which there were.
    assert found.returncode == 0 or f'alertname="{name}"' in found.stdout + found.stderr
    return found.returncode != 0


def test_by_default_they_are_those_of_the_plain_file() -> None:
    assert groups() == yaml.safe_load(RULES.read_text())["groups"]


def test_every_bound_stands_where_it_is_looked_for() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["metrics"]["prometheusRule"]["bounds"] == {
        key: bound["shipped"] for key, bound in BOUNDS.items()
    }
    known = {rule.get("alert", rule.get("record")) for rule in rules()}
    for key, bound in BOUNDS.items():
        assert bound["texts"].keys() <= known
        before, after = rules_of(groups()), rules_of(groups(bounds={key: CHANGED[key]}))
        touched = [
            (old.get("alert", old.get("record")), new)
            for old, new in zip(before, after, strict=True)
            if old != new
        ]
        assert {name for name, _ in touched} == set(bound["texts"])
        ways = {
            "{number}": str(CHANGED[key]),
            "{le}": f"{CHANGED[key]:.2f}",
            "{percent}": f"{CHANGED[key] * 100:g}",
        }
        for name, new in touched:
            for text in bound["texts"][name]:
                for way, number in ways.items():
                    text = text.replace(way, number)
                assert text in new["expr"] or text in new["annotations"]["description"]


@pytest.mark.parametrize(
    ("name", "bounds", "fired"),
    [
        ("WarmlaneErrorRatioHigh", {}, True),
        ("WarmlaneErrorRatioHigh", {"errorRatio": 0.2}, False),
        ("WarmlaneErrorRatioHigh", {"errorRatio": 0.1}, True),
        ("WarmlaneTtftBudgetBurn", {}, False),
        ("WarmlaneTtftBudgetBurn", {"ttftLateRatio": 0.0005}, True),
        ("WarmlaneTtftBudgetBurn", {"ttftLateRatio": 0.001, "ttftSeconds": 0.25}, True),
        ("WarmlaneTtftBudgetBurn", {"ttftLateRatio": 0.001, "ttftSeconds": 10}, False),
        ("WarmlaneCacheFull", {}, True),
        ("WarmlaneCacheFull", {"cacheFullRatio": 0.95}, False),
    ],
)
def test_a_changed_bound_decides_whether_it_fires(
    name: str, bounds: dict[str, float], fired: bool, tmp_path: Path
) -> None:
    assert fires(tmp_path, groups(bounds=bounds), name) is fired


def test_severities_labels_and_alerts_left_out() -> None:
    made = rules_of(
        groups(
            severities={"WarmlaneIndexGap": "critical"},
            alertLabels={"team": "inference"},
            disabledAlerts=["WarmlaneTracesLost", "WarmlaneTtftBudgetBurn"],
        )
    )
    found = [rule for rule in made if "alert" in rule]
    left = [
        a for a in alerts() if a["alert"] not in ("WarmlaneTracesLost", "WarmlaneTtftBudgetBurn")
    ]

    assert [rule["alert"] for rule in found] == [alert["alert"] for alert in left]
    for rule, alert in zip(found, left, strict=True):
        is_changed = alert["alert"] == "WarmlaneIndexGap"
        severity = "critical" if is_changed else alert["labels"]["severity"]
        assert rule["labels"] == {"severity": severity, "team": "inference"}


@pytest.mark.parametrize(
    "said",
    [
        {"bounds": {"errorRatio": 5}},
        {"bounds": {"ttftSeconds": 3}},
        {"bounds": {"ttftLateRatio": 0.07}},
        {"bounds": {"cacheFullRatio": 1}},
        {"bounds": {"queueRatio": 0.5}},
        {"severities": {"WarmlaneIndexGab": "info"}},
        {"severities": {"WarmlaneIndexGap": "loud"}},
        {"alertLabels": {"pool": "mine"}},
        {"alertLabels": {"severity": "page"}},
        {"alertLabels": {"my-team": "inference"}},
        {"disabledAlerts": ["WarmlaneEverything"]},
    ],
)
def test_what_cannot_work_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmValuesError):
        groups(**said)


def test_the_chain_keeps_its_links() -> None:
    with pytest.raises(helm.HelmRenderError, match="WarmlaneCacheFull is a link"):
        groups(disabledAlerts=["WarmlaneCacheFull"])
    both = groups(disabledAlerts=["WarmlaneCacheFull", "WarmlaneCacheThrashing"])
    assert "WarmlaneCacheFull" not in {rule.get("alert") for rule in rules_of(both)}
    (chain,) = (alert for alert in alerts() if alert["alert"] == "WarmlaneCacheThrashing")
    for name in names():
        if f'"{name}"' in chain["expr"]:
            with pytest.raises(helm.HelmRenderError, match=name):
                groups(disabledAlerts=[name])
