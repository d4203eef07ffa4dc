"""Recorded decisions of the simulator, taken again by our own code from what each one read."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gateway.routing.choose import Decision, Reason, RouteInput, choose
from gateway.routing.cost import Candidate, CostModel, queue_s

DATA = Path(__file__).parents[1] / "data" / "routing-golden"
TERMS = {
    "W": "queue_s",
    "P": "prefill_s",
    "I": "interleave_s",
    "R": "restore_s",
    "G": "interference_s",
    "M": "memory_s",
    "E": "eviction_s",
    "cost": "cost",
}


@cache
def golden(policy: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with gzip.open(DATA / f"{policy}.jsonl.gz", "rt") as lines:
        header, *decisions = map(json.loads, lines)
    assert len(decisions) == 504
    return header, decisions


def model(scenario: dict[str, Any]) -> CostModel:
    return CostModel(
        scenario["c"],
        scenario["a"],
        scenario["o"],
        scenario["v"],
        scenario["restore_cpu"],
        scenario["restore_disk"],
    )


def recorded_input(row: dict[str, Any], scenario: dict[str, Any]) -> RouteInput:
    """Put one recorded decision into our own words."""
    none = [0] * len(row["d"])
    constants = model(scenario)
    candidates = []
    for k in range(len(none)):
        cpu, disk = row.get("d_cpu", none)[k], row.get("d_disk", none)[k]
        candidates.append(
            Candidate(
                f"w{k}",
                hit_gpu=row["d"][k] - cpu - disk,
                hit_cpu=cpu,
                hit_disk=disk,
                in_flight=row["n"][k],
                queued_tokens=row["Qtok"][k],
                queued_s=row["Qsec"][k],
                context_tokens=row["ctx"][k],
                progress_at_s=row["t1"][k],
                active_tokens=row["act"][k],
                new_tokens=row["new"][k],
                restore_until_s=row.get("restore_until", none)[k],
                max_batched_tokens=scenario["T"],
                capacity_tokens=int(scenario["cap"]),
                held_tokens=row["held"][k],
                lru_age_s=row["lru_age"][k],
                cpu_capacity_tokens=int(scenario["cap_cpu"]),
                cpu_held_tokens=row.get("cpu_held", none)[k],
                cpu_age_s=row.get("cpu_age", none)[k],
                model=constants,
            )
        )
    return RouteInput(row["now"], row["L"], candidates, output_tokens=row["E_out"])


def workers(indices: list[int]) -> list[str]:
    return [f"w{k}" for k in indices]


def test_every_term_and_tied_set_of_the_recommended_policy_is_reproduced() -> None:
    header, rows = golden("ours-star")
    for row in rows:
        request = recorded_input(row, header["scenarios"][row["sc"]])
        decision = choose(request, rotation=row["row"])

        assert decision.tied == workers(row["best"])
        assert decision.worker in decision.tied
        for letter, name in TERMS.items():
            ours = [getattr(estimate, name) for estimate in decision.candidates]
            assert ours == pytest.approx(row[letter], rel=1e-9, abs=1e-15), (row["sc"], letter)


def test_every_recorded_decision_survives_json() -> None:
    header, rows = golden("ours-star")
    for row in rows[::7]:
        decision = choose(recorded_input(row, header["scenarios"][row["sc"]]), rotation=row["row"])
        read = Decision.from_json(decision.to_json())

        assert read == decision
        assert choose(read.input, rotation=read.rotation) == decision


def test_ties_take_every_worker_of_the_tied_set_in_turn() -> None:
    header, rows = golden("ours-star")
    tied = [row for row in rows if len(row["best"]) > 1]
    assert len(tied) == 14
    for row in tied:
        request = recorded_input(row, header["scenarios"][row["sc"]])
        turns = [choose(request, rotation=r).worker for r in range(len(row["best"]))]

        assert sorted(turns, key=str) == sorted(workers(row["best"]))


def test_the_plain_policy_shares_the_prefill_decode_restore_and_memory_terms() -> None:
    header, rows = golden("ours")
    for row in rows:
        # It has no drain and counts whole contexts as KV demand: say so in our own words.
        plain = {
            **row,
            "t1": [row["now"]] * len(row["d"]),
            "act": row["ctx"],
            "new": [row["L"] - header["parameters"]["out_allowance"]] * len(row["d"]),
            "held": [0] * len(row["d"]),
            "lru_age": [0] * len(row["d"]),
            "E_out": 0,
        }
        request = recorded_input(plain, header["scenarios"][row["sc"]])
        decision = choose(request)
        for letter in ("W", "P", "I", "R", "M"):
            ours = [getattr(estimate, TERMS[letter]) for estimate in decision.candidates]
            assert ours == pytest.approx(row[letter], rel=1e-9, abs=1e-15), (row["sc"], letter)


def test_the_fallback_without_constants_takes_the_recorded_choice() -> None:
    header, rows = golden("lmetric-events-queue")
    assert header["parameters"]["queue_weight"] == 1
    for row in rows:
        candidates = [
            Candidate(f"w{k}", hit_gpu=d, in_flight=row["n"][k], queued_tokens=row["Qtok"][k])
            for k, d in enumerate(row["d"])
        ]
        decision = choose(RouteInput(row["now"], row["L"], candidates))
        costs = [estimate.cost for estimate in decision.candidates]

        assert decision.unit == "token_requests"
        assert decision.reason is Reason.UNCALIBRATED
        # The recorded rule adds n * 1e-6 to break ties; all other costs are whole numbers.
        assert [float(round(cost)) for cost in row["cost"]] == costs
        assert set(workers(row["best"])) <= set(decision.tied)


def test_bounded_load_walks_the_ring_as_recorded() -> None:
    header, rows = golden("chwbl")
    assert header["parameters"]["load_factor"] == 1.25
    spilled = 0
    for row in rows:
        candidates = [Candidate(f"w{k}", in_flight=n) for k, n in enumerate(row["n"])]
        request = RouteInput(
            row["now"], row["L"], candidates, mode="strict", ring=workers(row["ring"])
        )
        decision = choose(request)

        assert [decision.worker] == workers(row["best"])
        at_home = decision.worker == f"w{row['ring'][0]}"
        assert decision.reason is (Reason.STRICT_HOME if at_home else Reason.STRICT_SPILL)
        spilled += not at_home
    assert spilled > 50


def test_idle_equal_workers_without_constants_are_chosen_by_requests_in_flight() -> None:
    _, rows = golden("least")
    for row in rows:
        candidates = [Candidate(f"w{k}", in_flight=n) for k, n in enumerate(row["n"])]
        decision = choose(RouteInput(row["now"], row["L"], candidates))

        assert decision.tied == workers(row["best"])


def test_the_queue_drains_with_time_but_never_below_zero() -> None:
    c = Candidate("w", queued_s=2.0, progress_at_s=10.0)

    assert queue_s(c, 9.0) == 2.0
    assert queue_s(c, 11.5) == 0.5
    assert queue_s(c, 99.0) == 0.0
