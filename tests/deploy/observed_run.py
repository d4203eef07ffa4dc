"""A run that is over, what Prometheus has of it, and what others say about it."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from tests.deploy.dashboard_parts import Target, all_values, filled, target
from tests.deploy.observed_fleet import ObservedFleet, Prometheus
from tests.deploy.scripted_run import Answer, Clients, Seen, run
from tests.e2e.fleet import wait_for

# A rate also counts for what lies between its window's ends and the samples next to them, as much
# as two intervals: one part in twenty of that many.
MIN_SAMPLES = 40


@dataclass(frozen=True)
class Observed:
    """A run that is over, and what Prometheus has of it.

    Attributes:
        began_s: All targets had been read between the run before and here.
        ended_s: And again between its last answer and here.
        runners: Counters of the runners, as they said themselves: what the run added.
        lines: The gateways' log lines of the run's requests.
    """

    prometheus: Prometheus
    fleet: ObservedFleet
    seen: Seen
    began_s: float
    ended_s: float
    runners: dict[str, float]
    lines: list[dict[str, Any]]

    @property
    def answers(self) -> list[Answer]:
        return self.seen.answers

    @property
    def window_s(self) -> float:
        return self.ended_s - self.began_s

    def values(self, name: str) -> dict[str, str]:
        window = f"{round(self.window_s * 1000)}ms"
        return all_values(name) | {"__rate_interval": window, "__range": window}

    def table(self, query: Target) -> list[tuple[dict[str, str], float]]:
        """Answer a query over the whole run."""
        expr = filled(query.expr, self.values(query.dashboard))
        rows = self.prometheus.query(expr, self.ended_s)
        return [(row["metric"], float(row["value"][1])) for row in rows]

    def number(self, name: str, title: str, legend: str = "__auto") -> float:
        ((_, value),) = self.table(target(name, title, legend))
        return value

    def total(self, name: str, title: str, legend: str) -> float:
        return sum(value for _, value in self.table(target(name, title, legend)))

    def begun(self, series: str, *labels: str) -> set[tuple[str, ...]]:
        """Label values that every gateway had counted before the run.

        What one of them counts for the first time within the window is in no rate of it.
        """
        expr = (
            f"count by ({', '.join(labels)}) (count by (instance, {', '.join(labels)}) ({series}))"
        )
        rows = self.prometheus.query(expr, self.began_s)
        every = str(len(self.fleet.gateways))
        return {
            tuple(row["metric"][label] for label in labels)
            for row in rows
            if row["value"][1] == every
        }

    def by(self, name: str, title: str, legend: str, label: str) -> dict[str, float]:
        return {m[label]: value for m, value in self.table(target(name, title, legend))}


def observe(fleet: ObservedFleet) -> Observed:
    """Do one run after another that made every series, so that none begins within the window."""
    with closing(Clients(fleet)) as clients:
        run(clients, "first", documents=3)
        fleet.wait_rest()
        before, num_lines = _runner_counters(fleet), len(fleet.request_lines())
        # Nothing happens then: a little earlier, so that no rounding leaves out a first sample.
        began_s = min(fleet.wait_scraped().values()) - 0.05
        seen = run(clients, "second", documents=5)
    fleet.wait_rest()
    after = _runner_counters(fleet)
    fleet.wait_samples(MIN_SAMPLES, began_s)
    ended_s = max(fleet.wait_scraped().values())
    num_lines += len(seen.answers)
    wait_for(lambda: len(fleet.request_lines()) >= num_lines, "the log has all requests")
    lines = fleet.request_lines()[-len(seen.answers) :]
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    return Observed(fleet.prometheus, fleet, seen, began_s, ended_s, grown, lines)


def _runner_counters(fleet: ObservedFleet) -> dict[str, float]:
    """Sums of counters over both runners and all labels but tier and direction."""
    sums: dict[str, float] = {}
    for runner in fleet.runners:
        text = fleet.text_of(runner)
        for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.M):
            kept = ",".join(
                f"{k}={v}" for k, v in re.findall(r'(tier|direction|reason)="([^"]*)"', labels)
            )
            key = f"{name}{{{kept}}}" if kept else name
            sums[key] = sums.get(key, 0.0) + float(value)
    return sums
