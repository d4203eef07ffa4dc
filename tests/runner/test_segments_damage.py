"""Damaged, cut off, foreign and vanished segment files: nothing wrong is ever handed out."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from runner.tiers.segments.layout import PAGE_BYTES
from tests.runner.segment_parts import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    LAYOUT,
    fill,
    grow,
    open_store,
    read,
    readable,
    ready_store,
    segment_files,
    until,
)

SLOTS = 8
FILE_BYTES = LAYOUT.file_bytes(SLOTS)
ENTRY_BYTES = LAYOUT.entry_bytes
# Offsets within a header and an entry.
HEADER_FIELDS = {
    "magic": 0,
    "version": 8,
    "entry bytes": 12,
    "slots": 16,
    "block size": 20,
    "number": 24,
    "reserved": 28,
    "block bytes": 32,
    "stride": 40,
    "data offset": 48,
    "namespace": 56,
    "crc": 88,
    "padding": 4_095,
}
ENTRY_FIELDS = {
    "key": 0,
    "parent": 32,
    "checksum": 64,
    "length": 80,
    "sequence": 88,
    "depth": 96,
    "state": 100,
    "tokens": 104,
    "padding": 180,
    "crc": ENTRY_BYTES - 4,
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root whose four segments are full: slot n holds block n."""
    root = tmp_path_factory.mktemp("template")
    store = ready_store(root)
    grow(store)
    assert store.ready_slots == 4 * SLOTS
    fill(store, range(4 * SLOTS))
    store.close()
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "root")


def flip(path: Path, offset: int, mask: int = 0x01) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ mask]))


def check_goes_on(root: Path) -> int:
    """Open a damaged root: what can be read is right, and new blocks are kept and found again.

    Returns how many of the blocks could be read.
    """
    store, recovered = open_store(root, capacity_bytes=2 * CAPACITY_BYTES)
    there = readable(store, recovered)
    until(lambda: store.ready_slots > 0)
    new = fill(store, range(min(6, store.ready_slots)), first_number=500)
    assert new
    assert read(store, new) == ("done", len(new))
    store.close()

    store, recovered = open_store(root, capacity_bytes=2 * CAPACITY_BYTES)
    assert {place.record.key for place in new} <= {place.record.key for place in recovered}
    assert read(store, new) == ("done", len(new))
    store.close()
    return there


@pytest.mark.parametrize("offset", HEADER_FIELDS.values(), ids=HEADER_FIELDS)
def test_a_damaged_header_sets_its_file_aside(root: Path, offset: int) -> None:
    flip(segment_files(root)[1], offset)
    with capture_logs() as logs:
        store, recovered = open_store(root)
    stats = store.stats()
    store.close()

    assert {place.record.depth for place in recovered} == {*range(8), *range(16, 32)}
    assert (stats.segments_set_aside_total, stats.set_aside_bytes) == (1, FILE_BYTES)
    assert [path.name for path in root.rglob("*.bad")] == ["seg-000001.kv.bad"]
    assert sum("set aside" in line["event"] for line in logs) == 1
    assert check_goes_on(root) == 24


@pytest.mark.parametrize("offset", ENTRY_FIELDS.values(), ids=ENTRY_FIELDS)
def test_a_damaged_entry_costs_one_block(root: Path, offset: int) -> None:
    flip(segment_files(root)[1], PAGE_BYTES + 3 * ENTRY_BYTES + offset, 0x80)
    store, recovered = open_store(root)

    assert {place.record.depth for place in recovered} == {*range(32)} - {11}
    assert store.stats().damaged_entries_total == 1
    assert read(store, recovered) == ("done", 31)
    store.close()

    store, _ = open_store(root)
    assert store.stats().damaged_entries_total == 0
    store.close()
    assert check_goes_on(root) == 31


@pytest.mark.parametrize("offset", [0, 1, 2_500, BLOCK_BYTES - 1])
def test_a_damaged_payload_is_a_miss_from_then_on(root: Path, offset: int) -> None:
    flip(segment_files(root)[0], LAYOUT.data_offset(SLOTS) + 5 * LAYOUT.stride_bytes + offset)
    store, recovered = open_store(root)
    places = sorted(recovered, key=lambda place: place.slot)

    assert len(places) == 32
    assert read(store, places) == ("damaged", 5)
    assert read(store, places) == ("missing", 5)
    assert store.stats().damaged_reads_total == 1
    store.close()

    store, recovered = open_store(root)
    assert len(recovered) == 31
    store.close()


def test_damage_while_the_store_is_open_is_found_by_the_next_read(root: Path) -> None:
    store, recovered = open_store(root)
    places = sorted(recovered, key=lambda place: place.slot)
    path = segment_files(root)[0]
    with path.open("r+b") as file:
        file.truncate(LAYOUT.data_offset(SLOTS) + 2 * LAYOUT.stride_bytes + 100)

    assert read(store, places) == ("damaged", 2)
    assert readable(store, places) == 2 + 24
    # Written again, the file has these slots back.
    assert len(fill(store, range(8))) == 8
    assert read(store, places) == ("done", 32)
    store.close()


def test_padding_between_payloads_may_hold_anything(root: Path) -> None:
    flip(segment_files(root)[0], LAYOUT.data_offset(SLOTS) + BLOCK_BYTES)

    assert check_goes_on(root) == 32


def foreign_namespace(root: Path) -> None:
    path = segment_files(root)[1]
    content = bytearray(path.read_bytes())
    content[56:88] = bytes(32)
    content[88:92] = struct.pack("<I", crc32(content[:88]))
    path.write_bytes(content)


def other_number(root: Path) -> None:
    first, second = segment_files(root)[:2]
    shutil.copy(first, second)


def not_a_segment(root: Path) -> None:
    segment_files(root)[1].write_text("a file of somebody else\n" * 1_000)


def empty(root: Path) -> None:
    segment_files(root)[1].write_bytes(b"")


def longer(root: Path) -> None:
    with segment_files(root)[1].open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("change", [foreign_namespace, other_number, not_a_segment, empty, longer])
def test_a_file_that_is_not_ours_is_set_aside_with_its_content(
    root: Path, change: Callable[[Path], None]
) -> None:
    change(root)
    content = segment_files(root)[1].read_bytes()

    assert check_goes_on(root) == 24
    (bad,) = root.rglob("*.bad")
    assert bad.read_bytes() == content


def test_a_second_bad_file_of_one_name_does_not_replace_the_first(root: Path) -> None:
    path = segment_files(root)[1]
    for content in (b"first", b"second"):
        path.write_bytes(content)
        store, _ = open_store(root)
        store.close()

    assert {bad.read_bytes() for bad in root.rglob("*.bad")} == {b"first", b"second"}


def test_files_set_aside_count_against_the_capacity(root: Path) -> None:
    flip(segment_files(root)[1], 0)
    store, recovered = open_store(root)
    store.invalidate([place.slot for place in recovered])
    until(lambda: fill(store, range(store.ready_slots)) != [] and not store.is_growing)

    assert store.ready_slots == 3 * SLOTS
    assert sum(path.stat().st_size for path in root.rglob("seg-*")) <= CAPACITY_BYTES
    store.close()


def test_vanished_files_are_missed_and_nothing_else(root: Path) -> None:
    segment_files(root)[2].unlink()

    assert check_goes_on(root) == 24


def test_half_made_files_of_a_killed_process_are_removed(root: Path) -> None:
    (root / segment_files(root)[0].parent.name / "seg-000009.kv.tmp").write_bytes(bytes(100_000))

    assert check_goes_on(root) == 32
    assert list(root.rglob("*.tmp")) == []


def test_entries_of_another_slot_do_not_vouch_for_a_payload(root: Path) -> None:
    path = segment_files(root)[0]
    content = bytearray(path.read_bytes())
    first, second = (
        slice(PAGE_BYTES + slot * ENTRY_BYTES, PAGE_BYTES + (slot + 1) * ENTRY_BYTES)
        for slot in (1, 4)
    )
    content[first], content[second] = content[second], content[first]
    path.write_bytes(content)
    store, recovered = open_store(root)

    swapped = [place for place in recovered if place.slot in (1, 4)]
    assert [read(store, [place]) for place in swapped] == [("damaged", 0)] * 2
    assert readable(store, [place for place in recovered if place not in swapped]) == 30
    store.close()


def damage(path: Path, kind: str, at: float, mask: int) -> None:
    size = path.stat().st_size
    offset = int(at * (size - 1))
    if kind == "flip":
        flip(path, offset, mask)
    elif kind == "truncate":
        with path.open("r+b") as file:
            file.truncate(offset)
    elif kind == "zero page":
        with path.open("r+b") as file:
            file.seek(offset // PAGE_BYTES * PAGE_BYTES)
            file.write(bytes(PAGE_BYTES))
    else:
        path.unlink()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["flip", "flip", "truncate", "zero page", "remove"]),
            # Half of it in the header and the table, which are a ninth of the file.
            st.one_of(st.floats(0, 1), st.floats(0, 0.12)),
            st.integers(1, 255),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda what: what[0],
    )
)
def test_any_damage_leaves_only_right_blocks_and_a_store_that_goes_on(
    template: Path,
    tmp_path_factory: pytest.TempPathFactory,
    what: list[tuple[int, str, float, int]],
) -> None:
    root = shutil.copytree(template, tmp_path_factory.mktemp("damage") / "root")
    for number, kind, at, mask in what:
        path = segment_files(template)[number].relative_to(template)
        damage(root / path, kind, at, mask)
    there = check_goes_on(root)

    assert there >= SLOTS * (4 - len(what))
    shutil.rmtree(root)


def test_an_undamaged_root_is_read_whole(root: Path) -> None:
    assert check_goes_on(root) == 32
