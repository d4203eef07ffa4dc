from __future__ import annotations

import json

import pytest

from runner.tiers.decision import Run
from runner.tiers.decision_log import MAX_DECISIONS, DecisionLog
from runner.tiers.gain import Gain
from runner.tiers.types import LoadDone
from tests.runner.gain_parts import Lab, Speed


@pytest.fixture
def lab() -> Lab:
    lab = Lab(1e-3, {"disk": Speed(1e9)})
    for _ in range(20):
        lab.transfer("disk", 16)
    return lab


def test_the_newest_decision_comes_first_with_its_age(lab: Lab) -> None:
    lab.decide(Run("disk", 1), owner="a")
    lab.now_s += 5
    lab.decide(Run("disk", 2), owner="b")

    rows = lab.gain.log.rows(lab.now_s + 1)

    assert [(row["request"], row["age_s"]) for row in rows] == [("b", 1.0), ("a", 6.0)]


def test_only_the_last_two_hundred_are_kept(lab: Lab) -> None:
    for number in range(MAX_DECISIONS + 50):
        lab.decide(Run("disk", 1), owner=str(number))

    rows = lab.gain.log.rows(lab.now_s)

    assert [row["request"] for row in rows] == [
        str(number) for number in reversed(range(50, MAX_DECISIONS + 50))
    ]


def test_a_decision_gets_its_actual_figures_when_the_load_is_done(lab: Lab) -> None:
    decision = lab.decide(Run("disk", 64), owner="a")
    assert lab.gain.log.rows(lab.now_s)[0]["actual"] is None

    done = LoadDone(7, 48, {"disk": 48}, "damaged", 0.2)
    lab.gain.observe_load(decision, done, lab.now_s)

    row = lab.gain.log.rows(lab.now_s)[0]
    assert row["actual"] == {
        "outcome": "damaged",
        "num_blocks": 48,
        "blocks_by_tier": {"disk": 48},
        "restore_s": 0.2,
        "saving_s": pytest.approx(0.768 - 0.2, rel=0.1),
    }
    assert row["predicted"]["restore_s"] == pytest.approx(64 * 2_097_152 / 1e9, rel=0.1)


def test_every_figure_of_a_decision_is_said_and_is_json(lab: Lab) -> None:
    lab.decide(Run("disk", 8), Run("cpu", 4), owner="a", first_block=2, waiting_tokens=1000)

    row = json.loads(json.dumps(lab.gain.log.rows(lab.now_s)))[0]

    assert set(row) == {
        *("age_s", "request", "decision", "reason", "num_blocks", "hit_blocks", "source", "runs"),
        *("start_tokens", "num_tokens", "predicted", "actual"),
    }
    assert set(row["predicted"]) == {
        *("recompute_s", "restore_s", "restore_p90_s", "management_s", "delivered", "weight"),
        *("gain_s", "bar_s", "saving_s"),
    }
    assert (row["start_tokens"], row["hit_blocks"]) == (32, 12)


def test_requests_that_ask_again_before_they_start_have_one_row_each(lab: Lab) -> None:
    for _ in range(30):
        for owner in ("waits for blocks", "as well"):
            lab.decide(Run("disk", 64), owner=owner)

    assert len(lab.gain.log.rows(lab.now_s)) == 2


def test_the_log_holds_nothing_of_requests_that_left_it(lab: Lab) -> None:
    for number in range(5 * MAX_DECISIONS):
        lab.decide(Run("disk", 64), owner=str(number))

    assert len(lab.gain.log._open) == MAX_DECISIONS


def test_a_request_of_the_same_name_after_a_finished_one_has_a_row_of_its_own(lab: Lab) -> None:
    lab.load(lab.decide(Run("disk", 64), owner="a"))
    lab.decide(Run("disk", 64), owner="a")

    assert len(lab.gain.log.rows(lab.now_s)) == 2


def test_savings_are_reported_also_for_decisions_that_left_the_log(lab: Lab) -> None:
    told: list[tuple[float, float]] = []
    lab.gain = Gain(
        lab.pricing,
        ("disk",),
        DecisionLog(lambda predicted_s, actual_s: told.append((predicted_s, actual_s))),
    )
    decision = lab.decide(Run("disk", 64), owner="slow")
    for number in range(MAX_DECISIONS + 1):
        lab.decide(Run("disk", 64), owner=str(number))

    lab.gain.observe_load(decision, LoadDone(1, 64, {"disk": 64}, "done", 10.0), lab.now_s)

    predicted_s, actual_s = told[0]
    assert predicted_s == pytest.approx(decision.saving_s)
    assert actual_s == pytest.approx(1.024 - 10.0, rel=0.05)
    assert len(lab.gain.log.rows(lab.now_s)) == MAX_DECISIONS
