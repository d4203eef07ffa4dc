"""The demo's verdict: which tables are good, and what is wrong with the others."""

from __future__ import annotations

import dataclasses
import json

import pytest

from gateway.demo import report
from gateway.demo.report import Row, judge, summary, table
from gateway.demo.workload import FOLLOW_UP, WORKLOAD, Ask, document, messages

COLD = Ask("first", "town", False, "q1")
WARM = Ask("second", "town", True, "q2")


def row(ask: Ask, **more) -> Row:
    values = {
        "worker": "w0",
        "prompt_tokens": 1000,
        "predicted_hit_tokens": 992 if ask.is_warm else 0,
        "observed_hit_tokens": 992 if ask.is_warm else 0,
        "ttft_s": 0.1 if ask.is_warm else 2.0,
        "answer": "a",
    }
    return Row(ask, **(values | more))


def test_a_good_run_has_no_problems() -> None:
    assert judge([row(COLD), row(WARM)], block_size=16) == []


WRONG = {
    "a warm request that missed": (
        {"observed_hit_tokens": 0, "predicted_hit_tokens": 0},
        "expected a hit",
    ),
    "a hit by chance, not predicted": ({"predicted_hit_tokens": 0}, "differ by 992"),
    "a prediction off by more than a block": ({"predicted_hit_tokens": 960}, "differ by 32"),
    "another worker than the holder": ({"worker": "w1"}, "does not hold it"),
}


@pytest.mark.parametrize(("change", "expected"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(change: dict[str, object], expected: str) -> None:
    warm = dataclasses.replace(row(WARM), **change)

    problems = judge([row(COLD), warm], block_size=16)

    assert len(problems) == 1
    assert problems[0].startswith("second: ")
    assert expected in problems[0]


def test_the_summary_compares_warm_with_cold() -> None:
    line = summary([row(COLD), row(WARM)], [])

    assert line == (
        "1 warm requests: 99% of their prompt tokens were hits, "
        "mean TTFT 0.100 s against 2.000 s cold (20.0x)"
    )


def test_the_table_is_aligned() -> None:
    lines = table([row(COLD), row(WARM)]).splitlines()

    assert len(lines) == 3
    assert len({len(line) for line in lines[1:]}) == 1


def test_no_request_of_the_workload_carries_a_hint_and_documents_share_nothing() -> None:
    for ask in (*WORKLOAD, FOLLOW_UP):
        chat = messages(ask, [])
        assert {tuple(message) for message in chat} == {("role", "content")}
    assert document("town")[:40] != document("island")[:40]
    assert document("town") == document("town")


def test_the_json_document_says_what_the_table_says() -> None:
    told = json.loads(report.document([row(COLD), row(WARM, worker="w1")], ["second: elsewhere"]))

    assert told["ok"] is False
    assert told["problems"] == ["second: elsewhere"]
    assert [(r["request"], r["worker"], r["is_warm"]) for r in told["requests"]] == [
        ("first", "w0", False),
        ("second", "w1", True),
    ]
    assert told["requests"][1]["observed_hit_tokens"] == 992
