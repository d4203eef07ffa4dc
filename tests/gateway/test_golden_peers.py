"""Recorded decisions of the peers' rules, taken again by the functions that ``replay`` uses."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gateway.replay.policies import (
    DynamoWeights,
    HashRing,
    LlmdWeights,
    PlainLoad,
    SglangThresholds,
    aibrix,
    bounded_load,
    dynamo,
    greatest,
    hash32,
    least,
    llmd,
    lmetric,
    mooncake,
    plain,
    sglang,
)
from gateway.routing.cost import CostModel

DATA = Path(__file__).parents[1] / "data" / "routing-golden"


@cache
def golden(policy: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with gzip.open(DATA / f"{policy}.jsonl.gz", "rt") as lines:
        header, *decisions = map(json.loads, lines)
    assert len(decisions) == 504
    return header, decisions


def cost_of(scenario: dict[str, Any]) -> CostModel:
    rates = scenario["restore_cpu"], scenario["restore_disk"]
    return CostModel(scenario["c"], scenario["a"], scenario["o"], scenario["v"], *rates)


def lower(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    none = [0] * len(row["d"])
    return row.get("d_cpu", none), row.get("d_disk", none)


def close(expected: list[float]) -> Any:
    return pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_least_requests_ties_as_recorded() -> None:
    for row in golden("least")[1]:
        assert least(row["n"]) == row["best"]


@pytest.mark.parametrize("policy", ["chwbl", "chwbl-kubeai"])
def test_bounded_load_walks_the_recorded_ring(policy: str) -> None:
    header, rows = golden(policy)
    parameters = header["parameters"]
    rings = {num_workers: HashRing(range(num_workers)) for num_workers in (4, 16)}
    for row in rows:
        point, ring = rings[len(row["n"])].order(row["key"])
        chosen = bounded_load(
            ring,
            row["n"],
            load_factor=parameters["load_factor"],
            plus_one=parameters["load_plus_one"],
        )
        assert (point, ring, [chosen]) == (row["hash"], row["ring"], row["best"])


@pytest.mark.parametrize("policy", ["sglang", "sglang-abs8"])
def test_sglang_takes_the_recorded_branch_and_workers(policy: str) -> None:
    header, rows = golden(policy)
    parameters = header["parameters"]
    thresholds = SglangThresholds(
        parameters["cache_threshold"],
        parameters["balance_abs_threshold"],
        parameters["balance_rel_threshold"],
    )
    for row in rows:
        assert sglang(row["d"], row["n"], row["L"], thresholds) == (row["branch"], row["best"])


@pytest.mark.parametrize("policy", ["dynamo", "dynamo-pls8"])
def test_dynamo_has_the_recorded_blocks_and_costs(policy: str) -> None:
    header, rows = golden(policy)
    p = header["parameters"]
    weights = DynamoWeights(
        p["overlap_credit"],
        p["prefill_load_scale"],
        p["decode_scale"],
        p["host_weight"],
        p["disk_weight"],
    )
    for row in rows:
        cpu, disk = lower(row)
        got = [
            dynamo(row["L"], d - cpu[k] - disk[k], cpu[k], disk[k], *load, weights)
            for k, (d, *load) in enumerate(
                zip(row["d"], row["Qtok"], row["act"], row["new"], strict=True)
            )
        ]
        prefill, decode, cost = (list(column) for column in zip(*got, strict=True))
        assert prefill == close(row["prefill_blocks"])
        assert decode == close(row["decode_blocks"])
        assert cost == close(row["cost"])
        assert least(cost) == row["best"]


def test_llmd_has_the_recorded_scores() -> None:
    header, rows = golden("llmd")
    p = header["parameters"]
    weights = LlmdWeights(p["prefix_weight"], p["queue_weight"], p["kv_weight"])
    for row in rows:
        got = llmd(row["d"], row["waiting"], row["kv"], row["L"], weights)
        prefix, queue, total = (list(column) for column in zip(*got, strict=True))
        assert prefix == close(row["s_prefix"])
        assert queue == close(row["s_queue"])
        assert total == close(row["score"])
        assert greatest(total) == row["best"]


def test_aibrix_takes_the_recorded_branch_and_workers() -> None:
    header, rows = golden("aibrix")
    p = header["parameters"]
    for row in rows:
        got = aibrix(row["d"], row["n"], imbalance_abs=p["imbalance_abs"], sd_factor=p["sd_factor"])
        assert got == (row["branch"], row["best"])


@pytest.mark.parametrize("policy", ["lmetric", "lmetric-events-queue"])
def test_lmetric_has_the_recorded_costs(policy: str) -> None:
    header, rows = golden(policy)
    weight = header["parameters"]["queue_weight"]
    for row in rows:
        queued = row.get("Qtok", [0] * len(row["d"]))
        got = [
            lmetric(row["L"], d, n, q, queue_weight=weight)
            for d, n, q in zip(row["d"], row["n"], queued, strict=True)
        ]
        assert got == close(row["cost"])
        assert least(got) == row["best"]


def test_mooncake_has_the_recorded_costs() -> None:
    header, rows = golden("mooncake")
    for row in rows:
        cost = cost_of(header["scenarios"][row["sc"]])
        columns = zip(row["d"], *lower(row), row["Qsec"], strict=True)
        got = [mooncake(row["L"], *column, cost) for column in columns]
        assert got == close(row["cost"])
        assert least(got) == row["best"]


def test_the_plain_rule_has_the_recorded_terms() -> None:
    header, rows = golden("ours")
    for row in rows:
        scenario = header["scenarios"][row["sc"]]
        cost = cost_of(scenario)
        cpu, disk = lower(row)
        until = row.get("restore_until", [0.0] * len(row["d"]))
        terms = []
        for k, d in enumerate(row["d"]):
            restore_s = cpu[k] / scenario["restore_cpu"] + disk[k] / scenario["restore_disk"]
            if restore_s:
                restore_s += max(0.0, until[k] - row["now"])
            load = PlainLoad(*(row[name][k] for name in ("n", "Qtok", "Qsec", "ctx")))
            terms.append(plain(row["L"], d, restore_s, load, cost, scenario["T"], scenario["cap"]))
        for letter, column in zip("WPIRM", zip(*terms, strict=True), strict=True):
            assert list(column) == close(row[letter]), (row["sc"], letter)
        assert least(map(sum, terms)) == row["best"]


def test_every_recorded_choice_is_among_the_recorded_best() -> None:
    files = sorted(DATA.glob("*.jsonl.gz"))
    assert len(files) == 14
    for file in files:
        rows = golden(file.name.removesuffix(".jsonl.gz"))[1]
        assert all(row["chosen"] in row["best"] for row in rows)


def test_the_mixing_function_is_the_recorded_one() -> None:
    rows = golden("chwbl")[1]
    assert all(hash32(row["key"] * 31 + 7) == row["hash"] for row in rows)
    assert hash32(0) == 0
    assert hash32(1 << 64) == hash32(0)
