"""Trace formats: what is read of them, and that nothing half-read is replayed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gateway.replay.traces import TraceError, read_trace
from tests.gateway.replay_parts import AGENTIC, CONVERSATION

ROW = [0, 1100, 20, 7, -1, 0, 0, [5, 2]]
MOONCAKE = {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [5, 6, 99]}
DECISION = {
    "v": 1,
    "t_unix_s": 1e9,
    "pool": "chat",
    "model": "m",
    "session": "00ff",
    "block_grain_tokens": 512,
    "blocks": ["0a" * 16, "0b" * 16],
    "prompt_tokens": 1100,
    "output_tokens": 20,
    "rotation": 3,
    "input": {},
    "worker": "w0",
    "reason": "home",
    "source": "own",
    "hit_tokens": 0,
    "outcome": "ok",
}


def write(tmp_path: Path, *rows: object) -> str:
    path = tmp_path / "trace.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_compact_row_is_read_with_its_blocks_as_a_chain(tmp_path: Path) -> None:
    child = [9, 1600, 1, 7, 0, 2500, 0, [5, 2, 11, 1]]
    trace = read_trace(write(tmp_path, ROW, child))
    first, second = trace.requests

    assert trace.format == "compact"
    assert (first.prompt_tokens, first.output_tokens, first.session) == (1100, 20, 7)
    assert [int.from_bytes(block, "big") for block in second.blocks] == [5, 6, 11]
    assert first.blocks == second.blocks[:2]
    assert (first.parent, second.parent, second.think_s) == (None, 0, 2.5)


def test_a_mooncake_row_has_its_partial_last_block_left_out(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))

    assert trace.format == "mooncake"
    assert [int.from_bytes(block, "big") for block in trace.requests[0].blocks] == [5, 6]


def test_mooncake_rows_of_one_timestamp_are_spread_up_to_the_next(tmp_path: Path) -> None:
    rows = [MOONCAKE | {"timestamp": at} for at in (0, 0, 0, 3000, 3000)]
    arrivals = [r.arrival_s for r in read_trace(write(tmp_path, *rows)).requests]

    assert arrivals == [0.0, 1.0, 2.0, 3.0, 3.0]


def test_mooncake_sessions_are_who_shares_more_than_the_template(tmp_path: Path) -> None:
    chains = [[0, 1, 2, 98], [0, 3, 4, 97], [0, 1, 2, 5, 96], [0, 3, 6, 95]]
    rows = [MOONCAKE | {"input_length": 512 * len(c) - 1, "hash_ids": c} for c in chains]
    sessions = [r.session for r in read_trace(write(tmp_path, *rows)).requests]

    assert sessions == [0, 1, 0, 1]


def test_the_same_rows_are_the_same_trace_in_both_public_formats(tmp_path: Path) -> None:
    compact = read_trace(CONVERSATION)
    rows = [
        {
            "timestamp": 1000 * r.arrival_s,
            "input_length": r.prompt_tokens,
            "output_length": r.output_tokens,
            "hash_ids": [*(int.from_bytes(b, "big") for b in r.blocks), 10**9 + r.row],
        }
        for r in compact.requests
        if r.prompt_tokens % 512
    ]
    mooncake = read_trace(write(tmp_path, *rows))
    kept = [r for r in compact.requests if r.prompt_tokens % 512]

    assert [r.blocks for r in mooncake.requests] == [r.blocks for r in kept]
    assert [r.arrival_s for r in mooncake.requests] == pytest.approx([r.arrival_s for r in kept])


def test_a_decision_log_is_traffic_in_order_of_arrival(tmp_path: Path) -> None:
    late = DECISION | {"t_unix_s": 1e9 + 5, "output_tokens": None}
    retried = DECISION | {"outcome": "upstream_reset"}
    trace = read_trace(write(tmp_path, late, DECISION, retried))

    assert trace.format == "decisions"
    assert [(r.arrival_s, r.output_tokens, r.line) for r in trace.requests] == [
        (0.0, 20, 2),
        (5.0, 20, 1),
    ]
    assert trace.requests[0].blocks == [b"\x0a" * 16, b"\x0b" * 16]
    assert trace.requests[0].session == 255
    assert trace.notes == [
        "1 failed attempts left out: they were sent again",
        "1 completions of unknown length taken as 20",
    ]


def test_a_log_of_two_pools_is_read_one_pool_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path, DECISION, DECISION | {"pool": "batch"})

    assert len(read_trace(path, pool="batch").requests) == 1
    with pytest.raises(TraceError, match="pools batch, chat: say which"):
        read_trace(path)
    with pytest.raises(TraceError, match="no line of pool 'x', only of batch, chat"):
        read_trace(path, pool="x")


def test_plain_and_gzipped_files_are_read_alike(tmp_path: Path) -> None:
    packed, plain = Path(AGENTIC), tmp_path / "plain.jsonl"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))

    assert read_trace(str(plain)).requests == read_trace(AGENTIC).requests


@pytest.mark.parametrize("first", [ROW, MOONCAKE, DECISION], ids=["compact", "mooncake", "log"])
@pytest.mark.parametrize("other", [ROW, MOONCAKE, DECISION], ids=["compact", "mooncake", "log"])
def test_mixed_formats_name_the_line_that_differs(
    tmp_path: Path, first: object, other: object
) -> None:
    path = write(tmp_path, first, "", first, other)
    if first is other:
        assert len(read_trace(path).requests) == 3
        return
    with pytest.raises(TraceError, match=r"trace\.jsonl:4: expected a .* row like the first"):
        read_trace(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "expected JSON|row like the first"),
        ([0, 1100, 20], "compact row like the first"),
        ([0, 0, 20, 7, -1, 0, 0, []], r"compact row like the first.*\[1\]"),
        ([-1, 1100, 20, 7, -1, 0, 0, [5, 2]], "compact row like the first"),
        ([0, 1100, 20, 7, -1, -5, 0, [5, 2]], "compact row like the first"),
        ([0, 1100, 20, 7, -1, 0, 0, [-5, 2]], "compact row like the first"),
        ([0, 1100, 20, 7, 1, 0, 0, [5, 2]], "an earlier row"),
        ([0, 1100, 20, 7, 9, 0, 0, [5, 2]], "an earlier row"),
        ([0, 1100, 20, 7, -1, 0, 0, [5]], "pairs of start and length"),
        ([0, 1100, 20, 7, -1, 0, 0, [5, 1]], "1100 tokens has 2 blocks of 512, not 1"),
        ([0, 1100, 20, 7, -1, 0, 0, [5, 3]], "1100 tokens has 2 blocks of 512, not 3"),
    ],
)
def test_a_broken_compact_row_names_file_and_line(
    tmp_path: Path, row: object, message: str
) -> None:
    with pytest.raises(TraceError, match=rf"trace\.jsonl:2: .*({message})"):
        read_trace(write(tmp_path, ROW, row))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timestamp": None}, "Mooncake row"),
        ({"input_length": "9"}, "Mooncake row"),
        ({"output_length": -1}, "Mooncake row"),
        ({"hash_ids": [5]}, "2 or 3 blocks of 512, not 1"),
        ({"hash_ids": [5, 6, 7, 8]}, "2 or 3 blocks of 512, not 4"),
        ({"input_length": 1024}, "2 blocks of 512, not 3"),
        ({"timestamp": 5}, "timestamps must not go back"),
    ],
)
def test_a_broken_mooncake_row_names_file_and_line(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    first = MOONCAKE | {"timestamp": 10}
    with pytest.raises(TraceError, match=rf"trace\.jsonl:2: .*{message}"):
        read_trace(write(tmp_path, first, MOONCAKE | {"timestamp": 20} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": 2}, "decision log row"),
        ({"prompt_tokens": 0}, "decision log row"),
        ({"session": "user 7"}, "session: expected a hash in hex"),
        ({"blocks": ["zz"]}, "blocks: expected hashes in hex"),
        ({"block_grain_tokens": 640}, "blocks of 640 tokens, others of 512"),
    ],
)
def test_a_broken_log_line_names_file_and_line(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(TraceError, match=rf"trace\.jsonl:2: .*{message}"):
        read_trace(write(tmp_path, DECISION, DECISION | {"t_unix_s": 2e9} | changes))


@pytest.mark.parametrize("text", ["", "\n\n", '"text"', "7", '{"a": 1}', "\x00\x01"])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        read_trace(write(tmp_path, text))


def test_a_file_that_is_not_there_or_torn_is_refused_by_name(tmp_path: Path) -> None:
    torn = tmp_path / "torn.gz"
    torn.write_bytes(Path(AGENTIC).read_bytes()[:500])
    with pytest.raises(TraceError, match="no such file"):
        read_trace(str(tmp_path / "none"))
    with pytest.raises(TraceError, match=r"torn\.gz: cannot be read"):
        read_trace(str(torn))
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(str(tmp_path))


def test_a_log_of_failures_only_has_no_traffic(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="every attempt failed"):
        read_trace(write(tmp_path, DECISION | {"outcome": "connect_failed"}))
