"""The ring moves only the keys it must, and spreads them evenly."""

from __future__ import annotations

from collections import Counter

from gateway.routing.ring import Ring

KEYS = [f"0:|session|s{i}" for i in range(10_000)]
EIGHT = [f"w{k}" for k in range(8)]


def homes(ring: Ring) -> dict[str, str]:
    return {key: ring.home(key, 1)[0] for key in KEYS}


def test_a_ninth_worker_takes_its_share_and_gives_it_back() -> None:
    ring = Ring(EIGHT)
    before = homes(ring)
    ring.add("w8")
    after = homes(ring)
    moved = {key for key in KEYS if before[key] != after[key]}

    assert {after[key] for key in moved} == {"w8"}
    assert len(moved) / len(KEYS) <= 1 / 9 + 0.03
    ring.remove("w8")
    assert homes(ring) == before


def test_a_removed_worker_moves_only_its_own_keys() -> None:
    ring = Ring(EIGHT)
    before = homes(ring)
    ring.remove("w3")
    after = homes(ring)

    assert {before[key] for key in KEYS if before[key] != after[key]} == {"w3"}
    assert "w3" not in after.values()


def test_the_order_in_which_workers_joined_does_not_matter() -> None:
    assert homes(Ring(EIGHT)) == homes(Ring(reversed(EIGHT)))


def test_keys_spread_over_the_workers() -> None:
    counts = Counter(homes(Ring(EIGHT)).values())

    assert len(counts) == 8
    assert max(counts.values()) / (len(KEYS) / 8) < 1.3


def test_a_home_is_a_set_of_distinct_workers_and_starts_the_order() -> None:
    ring = Ring(EIGHT)
    for key in KEYS[:200]:
        order = ring.order(key)

        assert sorted(order) == EIGHT
        assert ring.home(key, 2) == order[:2]
        assert ring.home(key, 99) == order


def test_an_empty_ring_and_odd_keys_are_no_errors() -> None:
    ring = Ring()
    assert ring.home("k", 2) == []
    assert ring.order("k") == []
    ring.remove("w0")
    ring.add("w0")
    assert ring.home("\ud800 ключ", 2) == ["w0"]
