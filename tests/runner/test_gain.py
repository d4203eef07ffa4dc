from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.tiers.decision import GainDecision, Run
from runner.tiers.gain import REOPEN_FACTOR
from runner.tiers.types import PeerSource
from tests.runner.gain_parts import BLOCK_BYTES, BLOCK_TOKENS, Lab, Speed

# 8,000 tokens of prefill a second, a model of 128 KiB a token: the public report of a slow disk.
TOKEN_S = 1 / 8000
SLOW, QUICK = Speed(1e6), Speed(10e9, 100e-6)


def test_a_disk_of_20_megabytes_a_second_loses_to_a_prefill_of_a_quarter_second() -> None:
    lab = Lab(TOKEN_S, {"disk": Speed(20e6)})
    for _ in range(3):
        lab.transfer("disk", 1)

    decision = lab.decide(Run("disk", 2000 // BLOCK_TOKENS))

    assert decision.num_blocks == 0
    assert decision.reason == "too_little"
    assert decision.recompute_s == pytest.approx(0.25, rel=0.1)
    assert decision.restore_s == pytest.approx(13.1, rel=0.1)
    told = decision.explain()
    assert told["decision"] == "recompute"
    assert told["predicted"]["restore_s"] == decision.restore_s
    assert told["predicted"]["recompute_s"] == decision.recompute_s


def test_with_a_slow_disk_first_tokens_come_at_most_a_tenth_later_than_without() -> None:
    lab = Lab(TOKEN_S, {"disk": Speed(20e6)})
    begun_s = lab.now_s
    for _ in range(100):
        lab.request(Run("disk", 125))
        lab.gain.probes_due(lab.now_s)

    assert lab.now_s - begun_s <= 1.1 * 100 * 125 * BLOCK_TOKENS * TOKEN_S


@given(rate=st.floats(3e9, 50e9), token_s=st.floats(100e-6, 1e-3), num_blocks=st.integers(16, 256))
@settings(max_examples=40, deadline=None)
def test_a_quick_tier_is_taken_whole(rate: float, token_s: float, num_blocks: int) -> None:
    lab = Lab(token_s, {"cpu": Speed(rate, 50e-6)})
    for _ in range(10):
        lab.transfer("cpu", 16)

    decision = lab.decide(Run("cpu", num_blocks))

    assert decision.num_blocks == num_blocks
    assert decision.reason == "worth"


def test_the_queue_decides_not_the_nominal_rate() -> None:
    lab = Lab(TOKEN_S, {"disk": Speed(7e9)})
    for _ in range(20):
        lab.transfer("disk", 64)

    assert lab.decide(Run("disk", 64)).num_blocks == 64
    lab.queued = {"disk": 2_000_000_000}
    assert lab.decide(Run("disk", 64)).num_blocks == 0


def test_the_hit_is_cut_where_a_slow_tier_begins() -> None:
    lab = Lab(TOKEN_S, {"cpu": Speed(20e9), "disk": Speed(20e6)})
    for _ in range(10):
        lab.transfer("cpu", 16)
        lab.transfer("disk", 1)

    decision = lab.decide(Run("cpu", 40), Run("disk", 60), Run("cpu", 30))

    assert (decision.num_blocks, decision.hit_blocks) == (40, 130)
    assert decision.runs == (Run("cpu", 40),)


def test_a_short_slow_run_is_crossed_for_a_long_quick_one_behind_it() -> None:
    lab = Lab(TOKEN_S, {"cpu": Speed(20e9), "disk": Speed(500e6)})
    for _ in range(10):
        lab.transfer("cpu", 16)
        lab.transfer("disk", 1)

    decision = lab.decide(Run("disk", 2), Run("cpu", 200))

    assert decision.num_blocks == 202


def test_a_load_that_saves_much_is_given_time_and_one_that_saves_little_is_not() -> None:
    lab = Lab(1e-3, {"cpu": QUICK, "disk": Speed(1e9)})
    for _ in range(20):
        lab.transfer("cpu", 16)
        lab.transfer("disk", 16)

    quick, slow = lab.decide(Run("cpu", 64)), lab.decide(Run("disk", 64))

    assert quick.patience_s == pytest.approx(quick.recompute_s / 4, abs=0.03)
    assert slow.patience_s == pytest.approx(3 * slow.restore_s, rel=0.1)


def test_a_pull_is_given_the_time_of_two_steps_of_a_busy_peer() -> None:
    lab = Lab(1e-3, {"peer": QUICK})
    source = PeerSource("http://a:1", 1024)
    for _ in range(20):
        lab.transfer("peer", 16, source.url)

    pull = lab.decide(peer_runs=(Run("peer", 64),), source=source)

    assert pull.source == source.url
    assert pull.patience_s == pytest.approx(pull.recompute_s / 2, abs=0.03)


def test_tiers_are_read_beside_one_another() -> None:
    lab = Lab(1e-3, {"cpu": Speed(2e9), "disk": Speed(1e9)})
    for _ in range(20):
        lab.transfer("cpu", 16)
        lab.transfer("disk", 16)

    decision = lab.decide(Run("cpu", 16), Run("disk", 16), Run("cpu", 16))

    assert decision.restore_s == pytest.approx(16 * BLOCK_BYTES / 1e9, rel=0.1)


def test_no_block_beyond_the_cap_is_planned() -> None:
    lab = Lab(1e-3, {"cpu": QUICK})
    for _ in range(20):
        lab.transfer("cpu", 16)
    query = lab.query(10, first_block=5)

    decision = lab.gain.decide([Run("cpu", 50)], query, queued={}, now_s=lab.now_s)

    assert decision.num_blocks == 10


PEER = PeerSource("http://peer:8000", 4096)


def test_a_peer_that_holds_more_wins_over_the_own_tiers() -> None:
    lab = Lab(TOKEN_S, {"cpu": QUICK, "peer": Speed(10e9, 1e-3)})
    for _ in range(20):
        lab.transfer("cpu", 16)
        lab.transfer("peer", 16, PEER.url)

    decision = lab.decide(Run("cpu", 20), peer_runs=(Run("peer", 200),), source=PEER)

    assert decision.source == PEER.url
    assert decision.runs == (Run("peer", 200),)


def test_own_tiers_win_over_a_peer_that_holds_the_same() -> None:
    lab = Lab(TOKEN_S, {"cpu": QUICK, "peer": Speed(3e9, 1e-3)})
    for _ in range(20):
        lab.transfer("cpu", 16)
        lab.transfer("peer", 16, PEER.url)

    decision = lab.decide(Run("cpu", 200), peer_runs=(Run("peer", 200),), source=PEER)

    assert decision.source == ""


def test_waiting_prefill_makes_a_second_of_compute_worth_up_to_two() -> None:
    lab = Lab(TOKEN_S, {"disk": QUICK})

    weights = [
        lab.decide(Run("disk", 64), waiting_tokens=waiting).weight
        for waiting in (0, 100, 1000, 10_000, 10**9)
    ]

    assert weights == sorted(weights)
    assert weights[0] == 1.0
    assert 1.9 < weights[-1] <= 2.0


def test_a_restore_as_long_as_computing_is_taken_only_while_others_wait() -> None:
    lab = Lab(TOKEN_S, {"disk": Speed(BLOCK_BYTES / (BLOCK_TOKENS * TOKEN_S))})
    for _ in range(20):
        lab.transfer("disk", 64)

    assert lab.decide(Run("disk", 64)).num_blocks == 0
    assert lab.decide(Run("disk", 64), waiting_tokens=20_000).num_blocks == 64


@pytest.mark.parametrize("seed", range(5))
def test_a_close_call_with_noise_does_not_flap(seed: int) -> None:
    rng = random.Random(seed)
    lab = Lab(TOKEN_S, {"disk": Speed(1.0)})
    # On the bar: a gain of a tenth of what computing costs.
    block_s = BLOCK_TOKENS * TOKEN_S
    lab.speeds["disk"] = Speed(BLOCK_BYTES / (0.9 * block_s))
    for _ in range(50):
        lab.transfer("disk", 64)

    choices = []
    for _ in range(1000):
        num_bytes = 64 * BLOCK_BYTES
        real_s = 64 * 0.9 * block_s * rng.lognormvariate(0, 0.1)
        lab.transfers.observe("disk", "read", num_bytes, real_s)
        choices.append(lab.decide(Run("disk", 64)).num_blocks > 0)

    flips = sum(before != after for before, after in pairwise(choices))
    assert flips <= 10


def test_after_a_refusal_the_gain_has_to_be_twice_the_bar() -> None:
    lab = Lab(TOKEN_S, {"disk": Speed(1.0)})
    block_s = BLOCK_TOKENS * TOKEN_S

    def at(share: float) -> GainDecision:
        lab.transfers = type(lab.transfers)()
        lab.pricing.transfers = lab.transfers
        lab.speeds["disk"] = Speed(BLOCK_BYTES / (share * block_s))
        for _ in range(20):
            lab.transfer("disk", 64)
        return lab.decide(Run("disk", 64))

    assert at(0.86).reason == "worth"
    assert at(0.95).reason == "too_little"
    close = at(0.86)
    assert close.reason == "close_call"
    assert close.bar_s == pytest.approx(REOPEN_FACTOR * 0.1 * close.recompute_s)
    assert at(0.7).reason == "worth"
    assert at(0.86).reason == "worth"


def test_what_is_not_sure_of_itself_does_not_spoil_what_lies_before_it() -> None:
    lab = Lab(TOKEN_S, {"cpu": Speed(20e9), "disk": Speed(1.0)})
    block_s = BLOCK_TOKENS * TOKEN_S
    lab.speeds["disk"] = Speed(BLOCK_BYTES / (0.95 * block_s))
    for _ in range(30):
        lab.transfer("cpu", 16)
        lab.transfer("disk", 64)
    assert lab.decide(Run("disk", 64)).reason == "too_little"
    lab.speeds["disk"] = Speed(BLOCK_BYTES / (0.87 * block_s))
    for _ in range(60):
        lab.transfer("disk", 64)

    decision = lab.decide(Run("cpu", 2), Run("disk", 64))

    assert decision.runs == (Run("cpu", 2),)


def test_a_hit_too_short_to_matter_does_not_make_longer_ones_harder() -> None:
    lab = Lab(TOKEN_S, {"disk": Speed(BLOCK_BYTES / (0.86 * BLOCK_TOKENS * TOKEN_S))})
    for _ in range(20):
        lab.transfer("disk", 64)
    assert lab.decide(Run("disk", 1)).reason == "too_little"

    assert lab.decide(Run("disk", 64)).reason == "worth"


def test_a_gain_below_half_a_millisecond_is_none() -> None:
    lab = Lab(TOKEN_S, {"cpu": Speed(1e12)}, block_bytes=1024)
    for _ in range(20):
        lab.transfers.observe("cpu", "read", 1024, 1e-6)

    assert lab.decide(Run("cpu", 1), first_block=0).recompute_s == pytest.approx(0.002, rel=0.3)
    quick = Lab(TOKEN_S / 10, {"cpu": Speed(1e12)}, block_bytes=1024)
    for _ in range(20):
        quick.transfers.observe("cpu", "read", 1024, 1e-6)
    assert quick.decide(Run("cpu", 1)).reason == "too_little"


def test_nothing_found_is_said_so() -> None:
    lab = Lab(TOKEN_S, {"cpu": QUICK})

    decision = lab.decide()

    assert (decision.num_blocks, decision.reason, decision.saving_s) == (0, "nothing_found", 0.0)


def test_predicted_and_actual_savings_agree_when_the_models_have_settled() -> None:
    lab = Lab(1e-3, {"disk": Speed(500e6, 1e-3)})
    for _ in range(30):
        lab.request(Run("disk", 64))

    rows = lab.gain.log.rows(lab.now_s)

    assert rows[0]["actual"]["saving_s"] == pytest.approx(
        rows[0]["predicted"]["saving_s"], rel=0.05
    )
    json.dumps(rows)
