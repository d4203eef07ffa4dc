"""Lines about who would notice: metrics and alerts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.doctor.checklist.exposition import family_names, samples_of
from gateway.doctor.checklist.names import ALERTS, BARE_METRICS, METRICS
from gateway.doctor.checklist.verdict import Verdict, failed, listed, passed, unknown

if TYPE_CHECKING:
    from gateway.doctor.checklist.facts import Facts


def metrics(facts: Facts) -> Verdict:
    """Every metric present: what alerts and dashboards read is exported."""
    if facts.metrics is None:
        return unknown(facts.why("metrics"), "Let this command reach the gateway's /metrics.")
    text, names = facts.metrics, family_names(facts.metrics)
    absent = [name for name in METRICS if name not in names]
    if absent:
        return failed(
            f"{len(absent)} of {len(METRICS)} metrics are not exported: {listed(absent)}",
            "Ask the gateway itself and not a proxy; gateway and this command must be of one "
            "version.",
        )
    silent = [name for name in BARE_METRICS if not any(samples_of(text, name))]
    reported = len(BARE_METRICS) - len(silent)
    rest = f"; nobody reports {listed(silent)}" if silent else ""
    return passed(
        f"all {len(METRICS)} there, {reported} of the {len(BARE_METRICS)} bare names{rest}"
    )


def alerts(facts: Facts) -> Verdict:
    """Every alert present: Prometheus evaluates the rules as shipped."""
    if facts.rules is None:
        return unknown(
            facts.missing.get("rules", "Prometheus was not asked"),
            "Name its address: --prometheus http://prometheus:9090.",
        )
    absent = [name for name in ALERTS if name not in facts.rules]
    if absent:
        return failed(
            f"{len(absent)} of {len(ALERTS)} alerts are not loaded: {listed(absent)}",
            "Load helm/warmlane/rules/warmlane.yaml (rule_files:), or set "
            "metrics.prometheusRule.enabled in the chart.",
        )
    broken = [name for name in ALERTS if facts.rules[name] == "err"]
    if broken:
        return failed(
            f"{listed(broken)} cannot be evaluated", "Prometheus says why on its page /rules."
        )
    return passed(f"Prometheus evaluates all {len(ALERTS)}")
