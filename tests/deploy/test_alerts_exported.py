"""What the alerts read is there: every metric and label, in what a real fleet exports."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from prometheus_client.samples import Sample

from tests.deploy.alert_parts import RULES, Exposed, expose, read_selectors
from tests.tools import tool

EXACT = re.compile(r'(\w+)="([^"]*)"')
SELECTORS = sorted(read_selectors())


@pytest.fixture(scope="module")
def exposed(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Exposed:
    return expose(tmp_path_factory.mktemp("exposed"), smollm2_dir)


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: f"{s.name}{{{s.matchers}}}")
def test_what_a_rule_reads_is_exported_with_its_labels(selector: object, exposed: Exposed) -> None:
    name, labels, matchers = selector  # type: ignore[misc]
    samples = [sample for sample in exposed.samples if sample.name == name]
    exact = dict(EXACT.findall(matchers))

    assert samples, f"nobody exports {name}"
    assert labels <= samples[0].labels.keys()
    assert any(exact.items() <= sample.labels.items() for sample in samples)


def test_how_full_a_worker_is_counts_what_it_caches(exposed: Exposed) -> None:
    (filled,) = (s for s in exposed.gateway if s.name == "warmlane_worker_kv_filled_ratio")
    (held,) = (
        s.value
        for s in exposed.gateway
        if s.name == "warmlane_index_blocks" and s.labels["tier"] == "gpu"
    )
    (config,) = (s.labels for s in exposed.runner if s.name == "vllm:cache_config_info")
    (in_use,) = (s.value for s in exposed.runner if s.name == "vllm:kv_cache_usage_perc")

    assert in_use == 0
    assert filled.value == held / int(config["num_gpu_blocks"]) > 0


def test_a_fleet_that_is_well_and_idle_fires_nothing(exposed: Exposed, tmp_path: Path) -> None:
    names = {selector.name for selector in SELECTORS}
    targets = {"g0": exposed.gateway, "r0": exposed.runner}
    series = [
        {"series": _series(sample, target), "values": f"{sample.value:g}x100"}
        for target, samples in targets.items()
        for sample in samples
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
