"""The decision log: what a line says, what it reproduces, and a disk that misbehaves."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.choose import Decision
from gateway.routing.decision_line import DecisionLogger, decision_line
from gateway.routing.dispatch import Dispatcher, Outcome, Plan, Usage
from gateway.routing.explain import decide_again, explain_json
from gateway.telemetry.append_file import AppendFile
from gateway.telemetry.decision_log import DecisionLine, DecisionLog, hashed_key
from tests.gateway.decision_parts import UNIX_OFFSET_S, Traffic, a_line, again
from tests.gateway.routing_parts import Clock, chat, dispatcher, make_pool
from tests.support import poll_until

HIDDEN = "the launch code is 0000"


def lines_of(path: Path) -> list[DecisionLine]:
    return [DecisionLine.from_json(line) for line in path.read_bytes().splitlines()]


def choice(decision: Decision) -> tuple[Any, ...]:
    return decision.worker, decision.reason, decision.source, decision.hit_tokens, decision.ttft_s


async def test_a_thousand_logged_requests_replay_to_the_identical_decisions(tmp_path: Path) -> None:
    pool = make_pool(8)
    for worker in pool.workers.values():
        worker.capacity_tokens = 30_000  # so that memory and eviction have a price
    traffic = Traffic(pool)
    await traffic.run(1000)
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(str(path))
    for line in traffic.lines:
        log.add(line, len(line.input.candidates))
    log.close()
    live = {ticket.decision.rotation: ticket.decision for ticket in traffic.sent}

    logged = lines_of(path)

    assert len(logged) == 1000
    assert (log.written, log.dropped, log.failed) == (1000, 0, 0)
    assert len({line.worker for line in logged}) == 8
    assert len({line.reason for line in logged}) > 2
    for line in logged:
        replayed = again(line)
        assert replayed == live[line.rotation]
        assert (line.worker, line.reason, line.source) == (
            replayed.worker,
            replayed.reason,
            replayed.source,
        )
        assert (line.hit_tokens, line.predicted_ttft_s) == (replayed.hit_tokens, replayed.ttft_s)


async def test_explain_and_the_live_decision_agree_on_a_thousand_requests() -> None:
    traffic = Traffic(make_pool(4))
    explained: list[dict[str, Any]] = []

    def explain(plan: Plan) -> None:
        document = explain_json(plan, traffic.routes.choose(plan))
        explained.append(json.loads(json.dumps(document)))

    await traffic.run(1000, before=explain)

    assert len(explained) == len(traffic.sent) == 1000
    for document, ticket in zip(explained, traffic.sent, strict=True):
        live = ticket.decision
        # The live choice is one later, and that is all that may differ: who of equals it is.
        same_turn = decide_again(document | {"rotation": live.rotation})
        assert same_turn["worker"] == live.worker
        if len(live.tied) == 1:
            assert document["decision"]["worker"] == live.worker
        assert document["decision"]["reason"] == live.reason
        assert document["prompt_tokens"] == live.input.prompt_tokens
        assert [c["worker"] for c in document["candidates"]] == [c.worker for c in live.candidates]


@pytest.mark.parametrize(
    "options",
    [
        {"model": None},
        {"is_strict": True},
        {"reads": False},
        {"mode": "approximate"},
        {"mode": "text"},
    ],
    ids=["new", "strict", "no tokenizer", "approximate", "text"],
)
async def test_every_way_to_decide_is_reproduced(options: dict[str, Any]) -> None:
    pool, clock = make_pool(3, **options), Clock()
    routes = dispatcher(pool, clock)
    for text in ("Why? " * 40, "x", "Another long text. " * 99):
        plan = await routes.plan(pool, chat(text))
        ticket = routes.admit(plan, routes.choose(plan))
        ticket.finish(Outcome.OK, Usage(100, 7, 0))
        line = decision_line(plan, ticket, unix_offset_s=0.0)

        read = DecisionLine.from_json(line.to_json())

        assert choice(again(read)) == choice(ticket.decision)


async def test_a_line_tells_what_was_predicted_and_what_came() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("word " * 300, headers={"x-session-id": "s1"}))
    ticket = routes.admit(plan, routes.choose(plan))
    clock.now_s += 0.25
    ticket.first_token()
    clock.now_s += 1.0
    ticket.finish(Outcome.OK, Usage(plan.num_tokens, 50, 0))

    line = decision_line(plan, ticket, unix_offset_s=UNIX_OFFSET_S)

    assert line.t_unix_s == UNIX_OFFSET_S + 1000.0
    assert (line.pool, line.model, line.outcome) == ("chat", "m", "ok")
    assert (line.observed_ttft_s, line.observed_hit_tokens) == (0.25, 0)
    assert line.predicted_ttft_s == ticket.decision.ttft_s
    assert line.prompt_tokens == plan.num_tokens
    assert plan.prompt is not None
    # 16 tokens a block, 512 a grain: the 32nd, the 64th ... hash.
    ends = range(31, len(plan.prompt.block_hashes), 32)
    assert line.blocks == [plan.prompt.block_hashes[at].hex() for at in ends]
    assert len(line.blocks) == plan.num_tokens // 512 > 1
    assert line.block_grain_tokens == 512


async def test_lines_tell_the_wall_clock_of_the_decision(tmp_path: Path) -> None:
    pool, clock = make_pool(2), Clock()
    log = DecisionLog(str(tmp_path / "log"))
    logger = DecisionLogger(log, clock=clock, clock_unix=lambda: clock() + 5e8, secret=b"s")
    routes = Dispatcher([pool], clock=clock, on_finish=logger.finished)
    plan = await routes.plan(pool, chat("hello"))
    ticket = routes.admit(plan, routes.choose(plan))
    clock.now_s += 9.0
    ticket.finish(Outcome.OK)
    log.close()

    (line,) = lines_of(tmp_path / "log")
    assert line.t_unix_s == 5e8 + 1000.0
    assert line.session == hashed_key(plan.key.ring_key, b"s")


async def test_requests_of_one_session_share_its_hash_and_nothing_else_does() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    found = []
    for text, session in (("one", "s1"), ("two", "s1"), ("one", "s2")):
        plan = await routes.plan(pool, chat(text, headers={"x-session-id": session}))
        ticket = routes.admit(plan, routes.choose(plan))
        ticket.finish(Outcome.REJECTED)
        found.append(decision_line(plan, ticket, unix_offset_s=0.0).session)

    assert found[0] == found[1] != found[2]
    assert hashed_key("1:a|session|s1") != hashed_key("1:a|session|s1", b"secret")


async def test_a_line_holds_no_text_and_no_raw_key() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    secrets = {
        "x-session-id": "session-of-carol",
        "authorization": "Bearer sk-12345",
        "x-document-id": "merger.pdf",
    }
    inbound = chat(
        HIDDEN, system=HIDDEN, headers=secrets, user="carol", prompt_cache_key="key-of-carol"
    )
    plan = await routes.plan(pool, inbound)
    ticket = routes.admit(plan, routes.choose(plan))
    ticket.finish(Outcome.OK)

    data = decision_line(plan, ticket, unix_offset_s=0.0).to_json().decode()

    for secret in (HIDDEN, "launch", "carol", "sk-12345", "merger"):
        assert secret not in data


BROKEN = {
    "no JSON": b"{",
    "not an object": b"[]",
    "no UTF-8": b'{"pool": "\xff"}',
    "another version": a_line().to_json().replace(b'"v":1', b'"v":2'),
    "a missing field": b'{"v": 1}',
    "a wrong type": a_line().to_json().replace(b'"prompt_tokens":3', b'"prompt_tokens":"3"'),
    "half a line": a_line().to_json()[:-9],
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_is_no_line_is_refused_with_what_was_expected(data: bytes) -> None:
    with pytest.raises(ValueError, match="expected a decision line of version 1"):
        DecisionLine.from_json(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_line_or_a_value_error(data: bytes) -> None:
    with suppress(ValueError):
        DecisionLine.from_json(data)


def test_what_waits_is_bounded_and_the_rest_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(str(path), max_waiting=100)
    for _ in range(10):
        log.add(a_line(), 16)
    log.close()

    assert (log.written, log.dropped) == (6, 4)
    assert len(lines_of(path)) == 6


async def test_lines_come_out_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(str(path))
    log.add(a_line(), 1)
    await poll_until(lambda: log.written == 1)
    log.add(a_line(worker="w1"), 1)
    log.close()

    assert [line.worker for line in lines_of(path)] == ["w0", "w1"]


def test_after_a_rotation_lines_go_to_a_new_file(tmp_path: Path) -> None:
    path, moved = tmp_path / "log", tmp_path / "log.1"
    file = AppendFile(str(path))
    file.write([b"1"])
    path.rename(moved)
    file.write([b"2"])
    path.unlink()
    file.write([b"3"])
    path.write_bytes(b"")  # as copytruncate does
    file.write([b"4"])
    file.close()

    assert (moved.read_bytes(), path.read_bytes()) == (b"1\n", b"4\n")
    assert (file.written, file.failed) == (4, 0)


def test_two_writers_share_a_file_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first, second = AppendFile(str(path)), AppendFile(str(path))
    for number in range(50):
        (first if number % 2 else second).write([b"%d" % number, b"x"])
    first.close()
    second.close()

    assert path.read_bytes().splitlines() == [
        piece for number in range(50) for piece in (b"%d" % number, b"x")
    ]


@pytest.mark.parametrize("room", range(18))
def test_a_full_disk_costs_lines_and_never_mixes_them(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the byte at which the disk was full, what is whole is counted, and only that."""
    path = tmp_path / "log"
    file = AppendFile(str(path))
    left = room
    write = os.write

    def write_while_there_is_room(fd: int, data: memoryview) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(fd, data[: min(left, 4)])
        left -= done
        return done

    monkeypatch.setattr(os, "write", write_while_there_is_room)
    file.write([b"11111", b"22222"])
    file.write([b"33333"])
    left = 1000
    file.write([b"44444"])
    file.close()

    whole = [line for line in path.read_bytes().splitlines() if len(line) == 5]
    assert file.written == len(whole)
    assert file.written + file.failed == 4
    assert whole[-1] == b"44444"
    assert {line[:1] * len(line) for line in path.read_bytes().splitlines()} == set(
        path.read_bytes().splitlines()
    )


def test_a_disk_that_goes_away_and_comes_back_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = AppendFile(str(folder / "log"))
    file.write([b"1"])
    (folder / "log").unlink()
    folder.rmdir()
    file.write([b"2"])
    folder.mkdir()
    file.write([b"3"])
    file.close()

    assert (folder / "log").read_bytes() == b"3\n"
    assert (file.written, file.failed) == (2, 1)


def test_a_path_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        DecisionLog(str(tmp_path / "missing" / "log"))


async def test_text_that_is_no_unicode_costs_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(str(path))
    log.add(a_line(model="\ud800"), 1)
    log.add(a_line(), 1)
    log.close()

    assert (log.written, log.failed) == (1, 1)
    assert len(lines_of(path)) == 1
