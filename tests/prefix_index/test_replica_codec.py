"""Bytes of the shared index: what is packed comes back, and nothing else is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_index.replica.codec import (
    GONE,
    Head,
    SharedValueError,
    State,
    entry_order,
    pack_delta,
    pack_head,
    pack_state,
    unpack_delta,
    unpack_head,
    unpack_plain,
    unpack_state,
)

hashes = st.binary(min_size=16, max_size=16)
copies = st.integers(1, 2**64 - 1)
names = st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=64)
states = st.builds(State, hashes, copies | st.just(1), names)


@given(states)
def test_a_state_comes_back_as_it_was(state: State) -> None:
    packed = pack_state(*state)
    assert unpack_state(packed) == state
    plain = unpack_plain(packed)
    assert plain is None or (plain[0], 1, plain[1]) == state


@given(st.binary(max_size=160))
def test_the_short_way_takes_nothing_that_the_long_one_refuses(value: bytes) -> None:
    plain = unpack_plain(value)
    if plain is not None:
        assert unpack_state(value) == State(plain[0], 1, plain[1])


@pytest.mark.parametrize("name", [2**64, -(2**63) - 1, b"x" * 129])
def test_a_name_that_no_engine_uses_is_left_out(name: int | bytes) -> None:
    assert unpack_state(pack_state(bytes(16), 1, name)).name is None


@given(st.dictionaries(hashes, st.none() | states, max_size=20))
def test_a_delta_comes_back_as_it_was(delta: dict[bytes, State | None]) -> None:
    packed = pack_delta({b: b"" if s is None else pack_state(*s) for b, s in delta.items()})
    expected = {block: GONE if state is None else state for block, state in delta.items()}
    assert dict(unpack_delta(packed)) == expected


u64 = st.integers(0, 2**64 - 1)


@given(st.builds(Head, u64, u64, u64, st.booleans(), st.booleans()))
def test_a_head_comes_back_as_it_was(head: Head) -> None:
    assert unpack_head(pack_head(head)) == head


@given(st.binary(max_size=200) | st.none() | st.text() | st.integers())
def test_anything_else_is_refused_in_one_way(value: object) -> None:
    for unpack in (unpack_state, unpack_head, lambda data: list(unpack_delta(data))):
        try:
            unpack(value)
        except SharedValueError:
            continue


@given(states, st.data())
def test_a_state_that_is_cut_off_is_never_taken_for_another_kind(
    state: State, data: st.DataObject
) -> None:
    packed = pack_state(*state)
    part = packed[: data.draw(st.integers(0, len(packed) - 1))]
    try:
        found = unpack_state(part)
    except SharedValueError:
        return
    assert isinstance(found.name, bytes)
    assert found.parent == state.parent


@pytest.mark.parametrize("value", [b"", b"-", b"1", b"1-", b"-1", b"x-y", b"1-2-3", b"1.5-0"])
def test_what_is_no_stream_id_is_refused(value: bytes) -> None:
    with pytest.raises(SharedValueError):
        entry_order(value)
    assert entry_order(b"12-3") > entry_order(b"9-10")
