from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.tiers.decision import GainDecision, Run
from runner.tiers.gain import MIN_GAIN_S, REOPEN_FACTOR
from runner.tiers.trust import MAX_LOSSES, PROBE_INTERVAL_S
from runner.tiers.types import LoadDone, PeerSource
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


@pytest.mark.parametrize("believed", ["unknown", "quick"])
def test_a_tier_of_one_megabyte_a_second_is_refused_after_at_most_three_losses(
    believed: str,
) -> None:
    # Slow prefill, so that even the low start rate looks worth it.
    lab = Lab(1e-3, {"disk": QUICK}, block_bytes=BLOCK_BYTES // 8)
    if believed == "quick":
        for _ in range(50):
            lab.transfer("disk", 16)
    lab.speeds["disk"] = SLOW

    restored = [lab.request(Run("disk", 16)).num_blocks > 0 for _ in range(200)]

    assert 1 <= sum(restored) <= MAX_LOSSES
    assert not any(restored[MAX_LOSSES:])


def test_a_tier_whose_loads_are_slow_though_its_reads_are_quick_is_refused() -> None:
    lab = Lab(1e-3, {"disk": QUICK})
    for _ in range(50):
        lab.transfer("disk", 16)
    losses = 0
    for _ in range(50):
        decision = lab.decide(Run("disk", 16))
        if decision.num_blocks:
            losses += 1
            lab.gain.observe_load(decision, lab_done(16, 5.0), lab.now_s)

    assert losses == MAX_LOSSES
    assert lab.gain.is_refused("disk")
    assert lab.decide(Run("disk", 16)).reason == "refused"


def test_small_wins_in_between_do_not_save_a_tier_that_loses_much() -> None:
    lab = Lab(1e-3, {"disk": QUICK})
    for _ in range(50):
        lab.transfer("disk", 16)
    losses = 0
    for number in range(20):
        decision = lab.decide(Run("disk", 16))
        if not decision.num_blocks:
            break
        losses += number % 2
        elapsed_s = 5.0 if number % 2 else 0.1
        lab.gain.observe_load(decision, lab_done(16, elapsed_s), lab.now_s)

    assert losses == MAX_LOSSES


def test_a_loss_that_was_made_up_for_is_forgotten() -> None:
    lab = Lab(1e-3, {"disk": QUICK})
    for _ in range(50):
        lab.transfer("disk", 16)
    for _ in range(20):
        for elapsed_s in (0.3, 0.01):
            decision = lab.decide(Run("disk", 16))
            lab.gain.observe_load(decision, lab_done(16, elapsed_s), lab.now_s)

    assert not lab.gain.is_refused("disk")


@given(rate=st.floats(3e9, 50e9), token_s=st.floats(100e-6, 1e-3), num_blocks=st.integers(16, 256))
@settings(max_examples=40, deadline=None)
def test_a_quick_tier_is_taken_whole(rate: float, token_s: float, num_blocks: int) -> None:
    lab = Lab(token_s, {"cpu": Speed(rate, 50e-6)})
    for _ in range(10):
        lab.transfer("cpu", 16)

    decision = lab.decide(Run("cpu", num_blocks))

    assert decision.num_blocks == num_blocks
    assert decision.reason == "worth"


def test_a_tier_of_ten_gigabytes_a_second_is_found_out_by_probes_and_taken() -> None:
    # At first its rate is guessed too low to be worth it on this GPU.
    lab = Lab(TOKEN_S / 4, {"disk": QUICK})
    assert lab.request(Run("disk", 64)).num_blocks == 0

    for _ in range(3):
        lab.now_s += PROBE_INTERVAL_S
        assert lab.probe() == ["disk"]

    assert lab.request(Run("disk", 64)).num_blocks == 64


def test_a_refused_tier_is_never_tried_by_a_request_but_probed_every_ten_seconds() -> None:
    lab = Lab(1e-3, {"disk": QUICK})
    for _ in range(50):
        lab.transfer("disk", 16)
    lab.speeds["disk"] = SLOW
    for _ in range(5):
        lab.request(Run("disk", 16))
    probes, begun_s = 0, lab.now_s
    while lab.now_s < begun_s + 600:
        probes += len(lab.probe())
        assert lab.request(Run("disk", 16)).num_blocks == 0

    assert 30 <= probes <= 61


def test_a_tier_that_recovers_is_taken_again_after_a_probe() -> None:
    lab = Lab(1e-3, {"disk": QUICK})
    for _ in range(50):
        lab.transfer("disk", 16)
    lab.speeds["disk"] = SLOW
    for _ in range(MAX_LOSSES):
        decision = lab.decide(Run("disk", 64))
        if decision.num_blocks:
            lab.load(decision)
    while not lab.gain.is_refused("disk"):
        lab.load(_forced(lab, 64))
    lab.now_s += PROBE_INTERVAL_S
    lab.probe()
    assert lab.gain.is_refused("disk")

    lab.speeds["disk"] = QUICK
    assert lab.request(Run("disk", 64)).num_blocks == 0
    lab.now_s += PROBE_INTERVAL_S
    assert lab.probe() == ["disk"]

    assert not lab.gain.is_refused("disk")
    assert lab.request(Run("disk", 64)).num_blocks == 64


def _forced(lab: Lab, num_blocks: int) -> GainDecision:
    """A decision to load, as one taken before the tier turned slow."""
    quick = Lab(lab.token_s, {"disk": QUICK})
    for _ in range(20):
        quick.transfer("disk", 16)
    return quick.decide(Run("disk", num_blocks))


def test_a_readmitted_tier_that_loses_once_more_is_refused_at_once() -> None:
    lab = Lab(1e-3, {"disk": SLOW})
    for _ in range(MAX_LOSSES):
        lab.load(_forced(lab, 64))
    lab.speeds["disk"] = QUICK
    lab.now_s += PROBE_INTERVAL_S
    lab.probe()
    assert not lab.gain.is_refused("disk")

    lab.speeds["disk"] = SLOW
    lab.load(_forced(lab, 64))

    assert lab.gain.is_refused("disk")


def test_probes_go_to_idle_and_refused_tiers_once_per_interval() -> None:
    lab = Lab(1e-3, {"cpu": QUICK, "disk": QUICK})
    assert lab.gain.probes_due(lab.now_s) == ["cpu", "disk"]
    assert lab.gain.probes_due(lab.now_s + 1) == []

    lab.now_s += PROBE_INTERVAL_S
    lab.load(_forced(lab, 4))

    assert lab.gain.probes_due(lab.now_s) == ["cpu"]
    assert lab.gain.next_probe_s() == pytest.approx(lab.now_s + PROBE_INTERVAL_S)


def test_a_failed_probe_brings_nobody_back() -> None:
    lab = Lab(1e-3, {"disk": SLOW})
    for _ in range(MAX_LOSSES):
        lab.load(_forced(lab, 64))

    for _ in range(10):
        lab.gain.observe_probe("disk", BLOCK_BYTES, 0.0001, "failed", lab.now_s)

    assert lab.gain.is_refused("disk")


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


def test_tiers_are_read_beside_one_another() -> None:
    lab = Lab(1e-3, {"cpu": Speed(2e9), "disk": Speed(1e9)})
    for _ in range(20):
        lab.transfer("cpu", 16)
        lab.transfer("disk", 16)

    decision = lab.decide(Run("cpu", 16), Run("disk", 16), Run("cpu", 16))

    assert decision.restore_s == pytest.approx(16 * BLOCK_BYTES / 1e9, rel=0.1)


def test_a_refused_tier_ends_the_hit_but_what_lies_before_it_counts() -> None:
    lab = Lab(1e-3, {"cpu": QUICK, "disk": QUICK})
    for _ in range(20):
        lab.transfer("cpu", 16)
    for _ in range(MAX_LOSSES):
        lab.gain.observe_load(
            _forced(lab, 16), lab_done(_forced(lab, 16).num_blocks, 60.0), lab.now_s
        )

    decision = lab.decide(Run("cpu", 20), Run("disk", 20), Run("cpu", 20))

    assert lab.gain.is_refused("disk")
    assert decision.runs == (Run("cpu", 20),)


def lab_done(num_blocks: int, elapsed_s: float) -> LoadDone:
    return LoadDone(1, num_blocks, {}, "done", elapsed_s)


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


def test_a_peer_that_lost_is_refused_alone_and_comes_back_by_a_probe() -> None:
    lab = Lab(1e-3, {"peer": SLOW}, block_bytes=BLOCK_BYTES // 64)
    other = PeerSource("http://other:8000", 4096)
    for _ in range(20):
        decision = lab.decide(peer_runs=(Run("peer", 64),), source=PEER)
        if decision.num_blocks:
            done = lab_done(64, 30.0)
            lab.gain.observe_load(decision, done, lab.now_s)

    assert lab.gain.is_refused("peer", PEER.url)
    assert not lab.gain.is_refused("peer", other.url)
    assert lab.gain.peer_probes_due(lab.now_s) == [PEER.url]
    assert lab.gain.peer_probes_due(lab.now_s) == []

    lab.gain.observe_probe("peer", lab.block_bytes, 50e-6, "done", lab.now_s, PEER.url)

    assert not lab.gain.is_refused("peer", PEER.url)


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


def test_a_tier_that_delivers_half_of_what_is_wanted_is_worth_less() -> None:
    lab = Lab(TOKEN_S, {"cpu": QUICK})
    for _ in range(20):
        lab.transfer("cpu", 16)
    whole = lab.decide(Run("cpu", 64))

    for _ in range(20):
        lab.load(lab.decide(Run("cpu", 64)), outcome="missing", num_blocks=32)

    assert lab.decide(Run("cpu", 64)).gain_s < 0.7 * whole.gain_s


def test_only_the_tier_that_broke_off_is_charged_with_what_did_not_come() -> None:
    lab = Lab(1e-3, {"cpu": QUICK, "disk": QUICK, "remote": QUICK})
    for _ in range(20):
        for tier in ("cpu", "disk", "remote"):
            lab.transfer(tier, 16)
    runs = (Run("cpu", 10), Run("disk", 10), Run("remote", 10))

    for _ in range(10):
        lab.load(lab.decide(*runs), outcome="damaged", num_blocks=15)

    shares = {tier: lab.decide(Run(tier, 10)).delivered for tier in ("cpu", "disk", "remote")}
    assert shares["cpu"] == shares["remote"] == 1.0
    assert shares["disk"] < 0.7


def test_a_request_that_went_away_is_no_loss() -> None:
    lab = Lab(1e-3, {"disk": QUICK})
    for _ in range(20):
        lab.transfer("disk", 16)

    for _ in range(20):
        lab.load(lab.decide(Run("disk", 16)), outcome="stopped", num_blocks=0)

    assert not lab.gain.is_refused("disk")
    assert lab.decide(Run("disk", 16)).num_blocks == 16


def test_a_load_stopped_at_its_deadline_is_a_loss() -> None:
    lab = Lab(1e-3, {"disk": QUICK})
    for _ in range(20):
        lab.transfer("disk", 16)
    for _ in range(MAX_LOSSES):
        decision = lab.decide(Run("disk", 16))
        late = LoadDone(decision.id, 0, {}, "stopped", 2 * decision.recompute_s)
        lab.gain.observe_load(decision, late, lab.now_s)

    assert lab.gain.is_refused("disk")


def test_a_block_that_is_missing_at_once_is_no_loss() -> None:
    lab = Lab(1e-3, {"remote": QUICK})
    for _ in range(20):
        lab.transfer("remote", 16)

    decision = lab.decide(Run("remote", 16))
    for _ in range(5):
        lab.gain.observe_load(decision, lab_done(0, MIN_GAIN_S / 2), lab.now_s)

    assert not lab.gain.is_refused("remote")


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
