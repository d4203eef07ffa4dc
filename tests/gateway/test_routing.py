"""choose(): what wins, what it says about it, and that it is the same every time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.routing.choose import Decision, Reason, RouteInput, choose
from gateway.routing.cost import Candidate, CostModel

# Round numbers: a prompt of 1000 tokens is one second of prefill.
SLOW = CostModel(0.001, 0.0, 0.01, 0.0)
NAMES = ("w0", "w1", "w2", "w3")


def request(*candidates: Candidate, prompt_tokens: int = 1000, **options: Any) -> RouteInput:
    return RouteInput(100.0, prompt_tokens, list(candidates), **options)


def worker(k: int, **options: Any) -> Candidate:
    options.setdefault("model", SLOW)
    return Candidate(f"w{k}", **options)


def test_nobody_eligible_is_an_answer_with_everybodys_numbers() -> None:
    decision = choose(request(worker(0, eligible=False, why="draining"), prompt_tokens=500))

    assert (decision.worker, decision.reason) == (None, Reason.NO_CANDIDATE)
    assert decision.ttft_s is None
    assert [e.worker for e in decision.candidates] == ["w0"]
    assert choose(request()).worker is None


def test_a_single_eligible_worker_is_taken_whatever_it_costs() -> None:
    busy = worker(1, in_flight=50, queued_s=99.0, queued_tokens=99_000, progress_at_s=100.0)
    decision = choose(request(worker(0, eligible=False, why="ejected"), busy))

    assert (decision.worker, decision.reason) == ("w1", Reason.ONLY_CANDIDATE)


def test_the_longest_prefix_wins_while_its_holder_is_free() -> None:
    decision = choose(request(worker(0), worker(1, hit_gpu=900), worker(2, hit_gpu=400)))

    assert (decision.worker, decision.reason) == ("w1", Reason.LONGEST_PREFIX)
    assert decision.hit_tokens == 900
    assert decision.ttft_s == pytest.approx(0.1 + 0.01)


def test_a_hot_prefix_gets_a_second_home_once_the_wait_exceeds_the_recompute() -> None:
    def holder(queued_s: float) -> Candidate:
        return worker(0, hit_gpu=900, queued_s=queued_s, progress_at_s=100.0)

    assert choose(request(holder(0.8), worker(1))).worker == "w0"
    decision = choose(request(holder(1.2), worker(1)))
    assert (decision.worker, decision.reason) == ("w1", Reason.LEAST_COST)


def test_exact_ties_rotate_through_all_of_them() -> None:
    candidates = [worker(k) for k in range(4)]
    turns = [choose(request(*candidates), rotation=r).worker for r in range(8)]

    assert turns == [*NAMES, *NAMES]


def test_a_prompt_nobody_holds_goes_home_when_the_home_is_nearly_the_cheapest() -> None:
    def busy(wait_s: float) -> Candidate:
        return worker(2, queued_s=wait_s, progress_at_s=100.0)

    near = choose(request(worker(0), worker(1), busy(0.019), home=["w2", "w1"]))
    assert (near.worker, near.reason) == ("w2", Reason.HOME)
    far = choose(request(worker(0), worker(1), busy(0.021), home=["w2", "w1"]))
    assert (far.worker, far.reason) == ("w1", Reason.HOME)


def test_for_short_prompts_near_means_a_tenth_of_the_cost() -> None:
    late = worker(1, queued_s=0.004, progress_at_s=100.0)
    decision = choose(request(worker(0), late, prompt_tokens=20, home=["w1"]))

    assert (decision.worker, decision.reason) == ("w0", Reason.LEAST_COST)


def test_home_counts_only_while_nobody_holds_a_quarter() -> None:
    def decide(hit: int) -> Decision:
        warm = worker(0, hit_gpu=hit, queued_s=hit / 1000, progress_at_s=100.0)
        return choose(request(warm, worker(1), home=["w1"]))

    assert decide(249).reason is Reason.HOME
    assert decide(250).reason is not Reason.HOME


def test_an_ineligible_home_is_passed_over() -> None:
    away = worker(0, eligible=False, why="ejected")
    decision = choose(request(away, worker(1), worker(2), worker(3), home=["w0", "w2"]))

    assert (decision.worker, decision.reason) == ("w2", Reason.HOME)


def test_one_unknown_speed_puts_all_candidates_into_one_unit() -> None:
    known = worker(0, queued_tokens=10_000, queued_s=10.0)
    decision = choose(request(known, worker(1, model=None, queued_tokens=500)))

    assert decision.unit == "token_requests"
    assert [e.cost for e in decision.candidates] == [11_000.0, 1500.0]
    assert (decision.worker, decision.reason) == ("w1", Reason.UNCALIBRATED)
    assert decision.ttft_s is None


def test_an_unknown_worker_that_cannot_be_chosen_does_not_change_the_unit() -> None:
    away = worker(1, model=None, eligible=False, why="draining")

    assert choose(request(worker(0), away, worker(2))).unit == "seconds"


def test_siblings_wait_for_the_worker_that_computes_their_prefix() -> None:
    leader = worker(0, pending_tokens=950, in_flight=1, queued_s=1.0, progress_at_s=100.0)
    decision = choose(request(leader, worker(1), worker(2), home=["w1"]))

    assert (decision.worker, decision.reason) == ("w0", Reason.SIBLING)
    assert decision.hit_tokens == 950


def test_siblings_go_elsewhere_when_waiting_costs_more_than_half_a_copy() -> None:
    def leader(queued_s: float) -> Candidate:
        return worker(0, pending_tokens=950, queued_s=queued_s, progress_at_s=100.0)

    assert choose(request(leader(1.4), worker(1))).worker == "w0"
    assert choose(request(leader(1.5), worker(1))).worker == "w1"


def test_siblings_of_unknown_speed_stay_together_up_to_a_number() -> None:
    def decide(in_flight: int) -> Decision:
        leader = worker(0, model=None, pending_tokens=950, in_flight=in_flight, queued_tokens=1000)
        return choose(request(leader, worker(1, model=None)))

    assert (decide(9).worker, decide(9).reason) == ("w0", Reason.SIBLING)
    assert (decide(10).worker, decide(10).reason) == ("w1", Reason.UNCALIBRATED)


def test_pending_work_counts_for_nothing_once_a_worker_holds_half_of_the_prompt() -> None:
    leader = worker(0, pending_tokens=950, queued_s=0.3, progress_at_s=100.0)

    assert choose(request(leader, worker(1, hit_gpu=499))).worker == "w0"
    decision = choose(request(leader, worker(1, hit_gpu=500)))
    assert (decision.worker, decision.reason) == ("w1", Reason.LONGEST_PREFIX)
    assert decision.candidates[0].hit_tokens == 0


def test_bad_health_is_a_dearer_worker_not_a_missing_one() -> None:
    decision = choose(request(worker(0, bias=4.0), worker(1)))
    assert decision.worker == "w1"
    # A prefix that saves more than the bias costs still wins.
    warm = choose(request(worker(0, bias=4.0, hit_gpu=990), worker(1)))
    assert warm.worker == "w0"


def test_a_worker_that_owes_first_tokens_is_dearer_by_its_lateness() -> None:
    decision = choose(request(worker(0, hit_gpu=900, overdue_s=2.0), worker(1)))

    assert decision.worker == "w1"
    assert decision.candidates[0].cost == pytest.approx(2.11)


@pytest.mark.parametrize(
    ("mode", "home", "spill"),
    [
        ("strict", Reason.STRICT_HOME, Reason.STRICT_SPILL),
        ("text", Reason.NO_TOKENS_HOME, Reason.NO_TOKENS_SPILL),
    ],
)
def test_hashing_modes_follow_the_ring_within_the_load_bound(
    mode: Any, home: Reason, spill: Reason
) -> None:
    ring = ["w2", "w0", "w1"]

    def decide(*loads: int) -> tuple[str | None, Reason]:
        candidates = [worker(k, in_flight=n, hit_gpu=900 * (k == 1)) for k, n in enumerate(loads)]
        decision = choose(request(*candidates, mode=mode, ring=ring, home=["w1"]))
        return decision.worker, decision.reason

    assert decide(0, 0, 0) == ("w2", home)
    assert decide(3, 3, 3) == ("w2", home)
    assert decide(0, 0, 9) == ("w0", spill)
    assert decide(9, 0, 9) == ("w1", spill)


def test_hashing_skips_ineligible_workers_and_counts_the_load_without_them() -> None:
    gone = worker(0, eligible=False, in_flight=100)
    decision = choose(
        request(
            gone, worker(1, in_flight=2), worker(2, in_flight=0), mode="strict", ring=list(NAMES)
        )
    )

    assert (decision.worker, decision.reason) == ("w2", Reason.STRICT_SPILL)


def test_a_choice_depends_on_nothing_but_its_input_and_survives_json() -> None:
    everything = request(
        worker(0, hit_gpu=16, hit_cpu=32, hit_disk=48, hit_remote=64, restore_until_s=101.5),
        worker(1, pending_tokens=700, in_flight=3, queued_tokens=40, queued_s=0.1 + 0.2),
        worker(2, eligible=False, why="ejected", bias=1 / 3, overdue_s=1e-17),
        worker(3, model=None, capacity_tokens=4096, held_tokens=4000, lru_age_s=7.7),
        output_tokens=123.4,
        home=["w3", "w1"],
        ring=list(NAMES),
    )
    for rotation in range(5):
        decision = choose(everything, rotation=rotation)

        assert choose(everything, rotation=rotation) == decision
        read = Decision.from_json(decision.to_json())
        assert read == decision
        assert choose(read.input, rotation=read.rotation) == decision
    assert msgspec.json.decode(msgspec.json.encode(everything), type=RouteInput) == everything


def test_every_reason_is_a_short_word_fit_for_a_label() -> None:
    assert all(reason.value.replace("_", "").isalpha() and len(reason) < 24 for reason in Reason)
