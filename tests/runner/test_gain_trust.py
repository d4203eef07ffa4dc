from __future__ import annotations

import pytest

from runner.tiers.decision import Run
from runner.tiers.gain import MIN_GAIN_S
from runner.tiers.trust import MAX_LOSSES, PROBE_INTERVAL_S
from runner.tiers.types import LoadDone, PeerSource
from tests.runner.gain_parts import BLOCK_BYTES, Lab, Speed, ended, forced

# 8,000 tokens of prefill a second, a model of 128 KiB a token: the public report of a slow disk.
TOKEN_S = 1 / 8000
SLOW, QUICK = Speed(1e6), Speed(10e9, 100e-6)


PEER = PeerSource("http://peer:8000", 4096)


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
            lab.gain.observe_load(decision, ended(16, 5.0), lab.now_s)

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
        lab.gain.observe_load(decision, ended(16, elapsed_s), lab.now_s)

    assert losses == MAX_LOSSES


def test_a_loss_that_was_made_up_for_is_forgotten() -> None:
    lab = Lab(1e-3, {"disk": QUICK})
    for _ in range(50):
        lab.transfer("disk", 16)
    for _ in range(20):
        for elapsed_s in (0.3, 0.01):
            decision = lab.decide(Run("disk", 16))
            lab.gain.observe_load(decision, ended(16, elapsed_s), lab.now_s)

    assert not lab.gain.is_refused("disk")


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
        lab.load(forced(lab, 64))
    lab.now_s += PROBE_INTERVAL_S
    lab.probe()
    assert lab.gain.is_refused("disk")

    lab.speeds["disk"] = QUICK
    assert lab.request(Run("disk", 64)).num_blocks == 0
    lab.now_s += PROBE_INTERVAL_S
    assert lab.probe() == ["disk"]

    assert not lab.gain.is_refused("disk")
    assert lab.request(Run("disk", 64)).num_blocks == 64


def test_a_readmitted_tier_that_loses_once_more_is_refused_at_once() -> None:
    lab = Lab(1e-3, {"disk": SLOW})
    for _ in range(MAX_LOSSES):
        lab.load(forced(lab, 64))
    lab.speeds["disk"] = QUICK
    lab.now_s += PROBE_INTERVAL_S
    lab.probe()
    assert not lab.gain.is_refused("disk")

    lab.speeds["disk"] = SLOW
    lab.load(forced(lab, 64))

    assert lab.gain.is_refused("disk")


def test_probes_go_to_idle_and_refused_tiers_once_per_interval() -> None:
    lab = Lab(1e-3, {"cpu": QUICK, "disk": QUICK})
    assert lab.gain.probes_due(lab.now_s) == ["cpu", "disk"]
    assert lab.gain.probes_due(lab.now_s + 1) == []

    lab.now_s += PROBE_INTERVAL_S
    lab.load(forced(lab, 4))

    assert lab.gain.probes_due(lab.now_s) == ["cpu"]
    assert lab.gain.next_probe_s() == pytest.approx(lab.now_s + PROBE_INTERVAL_S)


def test_a_failed_probe_brings_nobody_back() -> None:
    lab = Lab(1e-3, {"disk": SLOW})
    for _ in range(MAX_LOSSES):
        lab.load(forced(lab, 64))

    for _ in range(10):
        lab.gain.observe_probe("disk", BLOCK_BYTES, 0.0001, "failed", lab.now_s)

    assert lab.gain.is_refused("disk")


def test_a_refused_tier_ends_the_hit_but_what_lies_before_it_counts() -> None:
    lab = Lab(1e-3, {"cpu": QUICK, "disk": QUICK})
    for _ in range(20):
        lab.transfer("cpu", 16)
    for _ in range(MAX_LOSSES):
        lab.gain.observe_load(forced(lab, 16), ended(forced(lab, 16).num_blocks, 60.0), lab.now_s)

    decision = lab.decide(Run("cpu", 20), Run("disk", 20), Run("cpu", 20))

    assert lab.gain.is_refused("disk")
    assert decision.runs == (Run("cpu", 20),)


def test_a_peer_that_lost_is_refused_alone_and_comes_back_by_a_probe() -> None:
    lab = Lab(1e-3, {"peer": SLOW}, block_bytes=BLOCK_BYTES // 64)
    other = PeerSource("http://other:8000", 4096)
    for _ in range(20):
        decision = lab.decide(peer_runs=(Run("peer", 64),), source=PEER)
        if decision.num_blocks:
            done = ended(64, 30.0)
            lab.gain.observe_load(decision, done, lab.now_s)

    assert lab.gain.is_refused("peer", PEER.url)
    assert not lab.gain.is_refused("peer", other.url)
    assert lab.gain.peer_probes_due(lab.now_s) == [PEER.url]
    assert lab.gain.peer_probes_due(lab.now_s) == []

    lab.gain.observe_probe("peer", lab.block_bytes, 50e-6, "done", lab.now_s, PEER.url)

    assert not lab.gain.is_refused("peer", PEER.url)


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
        lab.gain.observe_load(decision, ended(0, MIN_GAIN_S / 2), lab.now_s)

    assert not lab.gain.is_refused("remote")
