"""What alerts and their pages ask for is there: tried on a real gateway and a real runner."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.samples import Sample

import warmlane
from tests.deploy.alert_parts import (
    OWN_NAMES,
    RULES,
    RUNBOOKS,
    Exposed,
    exposed_fleet,
    fenced,
    names,
    read_selectors,
    recorded_names,
    samples_of,
    selectors,
)
from tests.tools import tool

EXACT = re.compile(r'(\w+)="([^"]*)"')
SELECTORS = sorted(read_selectors())
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")
# Commands of the pages, as they are to be typed.
COMMANDS = sorted(
    {line for blocks in fenced("sh").values() for block in blocks for line in block.splitlines()}
)
# Those of their running text; capitals are what the reader fills in.
NAMED = sorted(
    {
        found
        for name in names()
        for found in re.findall(r"`(warmlane [^`]*)`", (RUNBOOKS / f"{name}.md").read_text())
    }
)


@pytest.fixture(scope="module")
def exposed(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exposed]:
    with exposed_fleet(tmp_path_factory.mktemp("exposed"), smollm2_dir) as exposed:
        yield exposed


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: f"{s.name}{{{s.matchers}}}")
def test_what_a_rule_reads_is_exported_with_its_labels(selector: object, exposed: Exposed) -> None:
    name, labels, matchers = selector  # type: ignore[misc]
    samples = [sample for sample in exposed.samples if sample.name == name]
    exact = dict(EXACT.findall(matchers))

    assert samples, f"nobody exports {name}"
    assert labels <= samples[0].labels.keys()
    assert any(exact.items() <= sample.labels.items() for sample in samples)


def test_how_full_a_worker_is_counts_what_it_caches(exposed: Exposed) -> None:
    (filled,) = (s for s in exposed.samples if s.name == "warmlane_worker_kv_filled_ratio")
    (held,) = (
        s.value
        for s in exposed.samples
        if s.name == "warmlane_index_blocks" and s.labels["tier"] == "gpu"
    )
    (config,) = (s.labels for s in exposed.samples if s.name == "vllm:cache_config_info")
    (in_use,) = (s.value for s in exposed.samples if s.name == "vllm:kv_cache_usage_perc")

    assert in_use == 0
    assert filled.value == held / int(config["num_gpu_blocks"]) > 0


def test_a_fleet_that_is_well_and_idle_fires_nothing(exposed: Exposed, tmp_path: Path) -> None:
    names = {selector.name for selector in SELECTORS}
    targets = {"g0": exposed.gateway, "r0": exposed.runner}
    series = [
        {"series": _series(sample, target), "values": f"{sample.value:g}x100"}
        for target, families in targets.items()
        for sample in samples_of(families)
        if sample.name in names
    ]
    series += [{"series": f'up{{instance="{target}"}}', "values": "1x100"} for target in targets]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "5m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [{"expr": "ALERTS", "eval_time": "95m", "exp_samples": []}],
            }
        ],
    }
    path = tmp_path / "idle.json"
    path.write_text(json.dumps(test))

    tested = subprocess.run(
        [tool("promtool"), "test", "rules", path], capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


def _series(sample: Sample, target: str) -> str:
    labels = {"instance": target, **sample.labels}
    return f"{sample.name}{{{', '.join(f'{k}={json.dumps(v)}' for k, v in labels.items())}}}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_page_answers(command: str, exposed: Exposed) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    urls = {"GATEWAY": exposed.gateway_url, "RUNNER": exposed.runner_url}
    shell = ["bash", "-o", "pipefail", "-c", command.replace("curl -s", "curl -fs")]

    ran = subprocess.run(
        shell, env={**os.environ, **urls, "PATH": path}, capture_output=True, check=False
    )

    # 3 = the doctor found something, 23 = head had read enough.
    assert ran.returncode in ((0, 3) if "doctor" in command else (0, 23)), ran.stderr
    assert ran.stdout


@pytest.mark.parametrize("command", NAMED)
def test_a_command_named_on_a_page_exists_with_its_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.split()[1:]
    verbs = [word for word in words[:2] if word.islower() and not word.startswith("-")]

    assert warmlane.main([*verbs, "--help"]) == 0
    told = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word not in told] == []


def test_queries_of_pages_are_valid_and_ask_for_what_is_exported(
    exposed: Exposed, tmp_path: Path
) -> None:
    queries = [query for blocks in fenced("promql").values() for query in blocks]
    group = [{"record": f"query:{n}", "expr": query} for n, query in enumerate(queries)]
    path = tmp_path / "queries.json"
    path.write_text(json.dumps({"groups": [{"name": "pages", "rules": group}]}))
    checked = subprocess.run(
        [tool("promtool"), "check", "rules", path], capture_output=True, text=True, check=False
    )
    known = {SUFFIX.sub("", family.name) for family in exposed.families}
    asked = {s.name for query in queries for s in selectors(query)} - recorded_names() - OWN_NAMES

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert {name for name in asked if SUFFIX.sub("", name) not in known} == set()
    assert len(queries) >= len(names()) - 3
