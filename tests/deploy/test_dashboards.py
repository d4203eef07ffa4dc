"""Conventions of all dashboards, each over every panel and query of every file.

There is no Grafana here: its own data model reads the files back, and ``test_prometheus.py`` sends
every query to a real Prometheus. How it looks on a screen nobody has seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.dashboards.files import FOLDER, rendered
from deploy.dashboards.series import FILTERS, family_of
from tests.deploy.dashboard_parts import NAMES, dashboard, panels, target, targets

PANELS = {f"{name}: {panel['title']}": panel for name in NAMES for panel in panels(name)}
TARGETS = targets()
SELECTOR = re.compile(r"([a-z][\w:]*)\{([^}]*)\}")
UNITS = {"s", "percentunit", "reqps", "count:tok/s", "short", "ops", "bytes", "Bps"}
BARE_NAMES = (
    "prefix_cache_hit_rate",
    "ttft_avg",
    "ttft_p95",
    "ttft_p99",
    "kv_cache_gpu_usage_bytes",
    "kv_cache_cpu_usage_bytes",
    "kv_cache_offload_read_latency",
    "kv_cache_offload_write_latency",
    "prefix_cache_hit_tokens",
    "prefix_cache_miss_tokens",
    "kv_cache_eviction_count",
    "gpu_stall_due_to_kv_restore",
)

each_dashboard = pytest.mark.parametrize("name", NAMES)


def test_the_files_are_what_the_generator_writes() -> None:
    written = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert written == rendered(), "run `python -m deploy.dashboards` and commit the files"
    assert {f"{name}.json" for name in NAMES} == written.keys()


@each_dashboard
def test_grafana_s_own_data_model_reads_all_of_a_dashboard(name: str) -> None:
    wanted = dashboard(name)
    read = json.loads(json.dumps(Dashboard.from_json(wanted), default=lambda it: it.to_json()))
    lost = list(_lost(wanted, read, name))
    assert lost == []


def _lost(wanted: Any, read: Any, at: str) -> Iterator[str]:
    """Yield what was written and not read; defaults may have been added."""
    if isinstance(wanted, dict) and isinstance(read, dict):
        for key, value in wanted.items():
            if value is not None:
                yield from _lost(value, read.get(key), f"{at}.{key}")
    elif isinstance(wanted, list) and isinstance(read, list) and len(wanted) == len(read):
        for number, (one, other) in enumerate(zip(wanted, read, strict=True)):
            yield from _lost(one, other, f"{at}[{number}]")
    elif wanted != read:
        yield f"{at}: {wanted!r} became {read!r}"


@each_dashboard
def test_a_dashboard_is_found_by_its_uid_and_links_to_its_siblings(name: str) -> None:
    board = dashboard(name)
    assert board["id"] is None
    assert board["uid"] == f"warmlane-{name}"
    assert board["editable"] is True
    assert board["graphTooltip"] == 1
    assert board["tags"] == ["warmlane"]
    (link,) = board["links"]
    assert (link["type"], link["tags"]) == ("dashboards", ["warmlane"])
    assert link["includeVars"] is True
    assert link["keepTime"] is True


@each_dashboard
def test_a_dashboard_is_filtered_by_regular_expressions(name: str) -> None:
    source, *filters = dashboard(name)["templating"]["list"]
    assert (source["name"], source["type"]) == ("datasource", "datasource")
    assert source["query"] == "prometheus"
    assert [it["name"] for it in filters][:4] == ["job", "instance", "pool", "worker"]
    for it in filters:
        assert it["type"] == "query"
        assert it["multi"]
        assert it["includeAll"]
        assert it["allValue"] == ".*", "`.+` would drop series that do not have the label"
        assert it["datasource"]["uid"] == "${datasource}"


@each_dashboard
def test_the_first_row_is_six_to_eight_numbers(name: str) -> None:
    board = dashboard(name)
    first = [panel for panel in board["panels"] if panel["gridPos"]["y"] == 0]
    assert 6 <= len(first) <= 8
    assert {(panel["type"], panel["gridPos"]["h"]) for panel in first} == {("stat", 4)}


@each_dashboard
def test_panels_have_names_of_their_own_and_lie_side_by_side(name: str) -> None:
    board = dashboard(name)["panels"]
    assert len({panel["id"] for panel in board}) == len(board)
    assert len({panel["title"] for panel in board}) == len(board)
    places = [panel["gridPos"] for panel in board]
    assert all(p["x"] >= 0 and p["x"] + p["w"] <= 24 and p["h"] > 0 for p in places)
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below, (one, other)


def test_a_panel_says_what_it_shows_and_which_series_that_is() -> None:
    for at, panel in PANELS.items():
        match = re.fullmatch(r"\S.{20,}\. Metric: `([\w:]+)`", panel["description"])
        assert match, f"{at}: {panel['description']}"
        assert any(match[1] in it["expr"] for it in panel["targets"]), at


def test_a_panel_asks_the_chosen_data_source() -> None:
    for at, panel in PANELS.items():
        asked = [panel, *panel["targets"]]
        assert {it["datasource"]["uid"] for it in asked} == {"${datasource}"}, at
        letters = [it["refId"] for it in panel["targets"]]
        assert letters == list("ABCDEFGH")[: len(letters)], at


def test_a_panel_has_a_unit_and_words_for_no_data() -> None:
    for at, panel in PANELS.items():
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in UNITS, at
        assert defaults["noValue"], at
        (mapping,) = defaults["mappings"]
        shown = {"match": "nan", "result": {"text": defaults["noValue"]}}
        assert mapping["options"] == shown, at


def test_a_graph_has_a_legend_of_numbers_and_a_shared_tooltip() -> None:
    graphs = {at: panel for at, panel in PANELS.items() if panel["type"] == "timeseries"}
    assert len(graphs) > 40
    for at, panel in graphs.items():
        legend = panel["options"]["legend"]
        assert (legend["displayMode"], legend["showLegend"]) == ("table", True), at
        assert legend["calcs"] == ["mean", "max", "lastNotNull"], at
        assert panel["options"]["tooltip"] == {"mode": "multi", "sort": "desc"}, at
        assert all(it["legendFormat"] != "__auto" for it in panel["targets"]), at


def test_graphs_of_ttft_link_to_traces() -> None:
    for at, panel in PANELS.items():
        is_of_ttft = any("warmlane_ttft_" in it["expr"] for it in panel["targets"])
        wanted = is_of_ttft and panel["type"] == "timeseries"
        assert {it["exemplar"] for it in panel["targets"]} == {wanted}, at


def test_colours_mark_thresholds_only() -> None:
    for at, panel in PANELS.items():
        defaults = panel["fieldConfig"]["defaults"]
        base, *steps = defaults["thresholds"]["steps"]
        assert base["value"] is None, at
        values = [step["value"] for step in steps]
        assert values == sorted(values), at
        if panel["type"] == "stat":
            assert (defaults["color"]["mode"] == "thresholds") == bool(values), at


def test_a_query_filters_by_the_labels_that_its_series_have() -> None:
    for query in TARGETS:
        selectors = SELECTOR.findall(query.expr)
        assert selectors, query.id
        for series, matchers in selectors:
            used = set(re.findall(r'(\w+)=~"\$\1"', matchers)) - {"prompt_length"}
            wanted = {"job", "instance", *FILTERS[family_of(series)]}
            assert used == wanted, f"{query.id}: {series}"


def test_rates_go_over_the_interval_that_grafana_chooses() -> None:
    for query in TARGETS:
        windows = set(re.findall(r"\[([^\]]*)\]", query.expr))
        allowed = {"$__range"} if query.is_instant else {"$__rate_interval"}
        assert windows <= allowed, query.id


def test_counters_are_read_as_rates() -> None:
    counter = re.compile(r"[a-z][\w:]*_(?:total|bucket|sum|count)\{[^}]*\}(\[)?")
    for query in TARGETS:
        # Warm-up pays back over hours: that quotient goes back to the start, and says so.
        if query.id != "warmup: Return: __auto":
            assert all(match[1] for match in counter.finditer(query.expr)), query.id


def test_every_divisor_is_guarded() -> None:
    seen = 0
    for query in TARGETS:
        for match in re.finditer(r" / ", query.expr):
            divisor = _parenthesis(query.expr[match.end() :])
            assert divisor.endswith(" > 0)"), query.id
            seen += 1
    assert seen > 20


def _parenthesis(text: str) -> str:
    """The parenthesis that a text begins with; empty if it does not."""
    depth = 0
    for at, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[: at + 1] if at else ""
    return ""


def test_nothing_is_made_up_where_there_is_no_data() -> None:
    for query in TARGETS:
        divisors = [
            _parenthesis(query.expr[match.end() :]) for match in re.finditer(r" / ", query.expr)
        ]
        made_up = r"or\s+(on\s*\(.*?\)\s*)?vector"
        inside = sum(len(re.findall(made_up, divisor)) for divisor in divisors)
        assert len(re.findall(made_up, query.expr)) == inside, query.id


def test_quantiles_come_from_buckets_added_up() -> None:
    seen = 0
    for query in TARGETS:
        for match in re.finditer(r"histogram_quantile\([\d.]+, ", query.expr):
            seen += 1
            inner = query.expr[match.end() :]
            assert re.match(r"sum by \(le(, \w+)*\) \(rate\(\w+_bucket\{", inner), query.id
            # And nothing is done with a quantile but to name its labels.
            before = query.expr[: match.start()]
            assert re.fullmatch(r"(label_replace\()*", before), query.id
    assert seen > 20


def test_the_bare_names_of_the_contract_are_read_by_no_dashboard() -> None:
    """Quantile gauges cannot be combined, and the same names come from gateways and runners."""
    for query in TARGETS:
        for series, _ in SELECTOR.findall(query.expr):
            assert series not in BARE_NAMES, query.id


def test_only_series_that_a_dashboard_shows_are_listed() -> None:
    asked = [
        it["query"]["query"]
        for name in NAMES
        for it in dashboard(name)["templating"]["list"]
        if it["type"] == "query"
    ]
    shown = {family_of(series) for it in TARGETS for series, _ in SELECTOR.findall(it.expr)}
    unused = {name for name in FILTERS if name not in shown and name not in " ".join(asked)}
    assert unused == set()


def test_the_error_ratio_is_0_and_not_empty_while_nothing_fails() -> None:
    expr = target("overview", "Error ratio").expr
    assert re.search(r" or 0 \* sum \(rate\(warmlane_requests_total", expr)
