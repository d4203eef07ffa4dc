"""Volatile text is found by its shape, told without its value, and never at a price."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_index.volatile import MAX_SPANS, find_volatile, skip_volatile
from tests.support import cpu_s

UUID = "7f0c1f2e-2f0b-4a55-9b1e-3d0b7a3c9d10"
BILLING = "x-anthropic-billing-header: cc_version=2.1.99.a1b; cc_entrypoint=cli; cch=1a2b3;"

FOUND = {
    "datetime": [
        "Monday, November 30, 2026 10:14 AM",
        "November 30th, 2026 at 10:14",
        "2026-11-30T09:00:00Z",
        "2026-11-30 09:00:00.123456+00:00",
        "2026/11/30 9:00",
        "11/30/2026 10:14 PM",
        "30.11.2026 10:14:05",
        "30 Nov 2026, 10:14 UTC",
        "Mon Nov 30 10:14:00 2026",
        "Mon, 30 Nov 2026 10:14:00 GMT",
        "30. November 2026 um 10:14",
        "2026年11月30日 10:14",
    ],
    "date": [
        "2026-11-30",
        "2026-01-01",
        "November 30, 2026",
        "Monday, 30 November 2026",
        "30 Nov 2026",
        "30th of November 2026",
        "11/30/2026",
        "30/11/2026",
        "30.11.2026",
        "30. Dezember 2026",
        "30 novembre 2026",
        "30 de noviembre de 2026",
        "30 août 2026",
        "2026年11月30日",
    ],
    "uuid": [UUID, UUID.upper()],
    "hex_id": ["4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "507f1f77bcf86cd799439011"],
    "random": [
        "req_011CSHoEeqs5C35K2UUqR7Fy",
        "V1StGXR8Z5jdHi6BmyTq9w2",
        "chatcmpl-9f8KdQ2xYb7LmN4pRs1TvWz0",
    ],
    "attribution_header": [BILLING],
}
# What is said -> the part of it that changes.
SPOKEN = {
    "datetime": [
        ("The time is 10:14 AM", "10:14 AM"),
        ("Current time: 22:05:17", "22:05:17"),
        ('"timestamp": 1764500000', "1764500000"),
        ("epoch=1764500000123", "1764500000123"),
    ],
    "counter": [
        ("request #42", "42"),
        ("Turn: 7", "7"),
        ("message 3 of 40", "3 of 40"),
        ("attempt 2/5", "2/5"),
        ("request_id=12345678", "12345678"),
    ],
    "hex_id": [("session id: abc123f", "abc123f"), ("trace_id=4bf92f35", "4bf92f35")],
    "random": [("nonce: k3y-T9x", "k3y-T9x"), ("Conversation-ID: zq81-ab", "zq81-ab")],
}
LOOK_ALIKES = [
    "version 2.1.99",
    "v2026.11.30",
    "Python 3.11.4",
    "$1,299.00",
    "1.299,00 EUR",
    "ISBN 978-3-16-148410-0",
    "ISBN 0306406152",
    "commit 4e45314",
    "deadbeef and facade and decade",
    "cafebabe0123",
    "Step 3: do it",
    "rule 7: refunds within 30 days",
    "issue #42 and PR #7",
    "gpt-4o-mini-2024-07-18",
    "claude-3-5-sonnet-20241022",
    "getHTTPResponse2XXHandler",
    "ISO8601DateTimeFormat2",
    "Windows11ProEditionBuild",
    "internationalization",
    "SCREAMING_SNAKE_CASE_V2_3_4",
    "192.168.100.200:8080",
    "https://example.test/2026/11/30/post",
    "+1-202-555-0143",
    "4111111111111111",
    "SHA-256, RFC2119, ISO-8859-1",
    "12/30",
    "ratio 16:9",
    "open 9:00 to 17:00",
    "2026-13-41",
    "45/45/2026",
    "chapter 12 edition 2026",
    "7 items 2026",
    "fiscal year 2026",
    "per request 3 tokens",
    "the header x-anthropic-billing-header: is quoted here",
    "1234567890123456789",
]


def shown(text: str) -> list[tuple[str, str]]:
    return [(span.kind, text[span.start_char : span.end_char]) for span in find_volatile(text)]


@pytest.mark.parametrize(
    ("kind", "value"), [(kind, value) for kind, values in FOUND.items() for value in values]
)
def test_each_kind_is_found_whole_wherever_a_sentence_puts_it(kind: str, value: str) -> None:
    places = ["{}", "{}\nYou are a bot.", "Hello.\n{}", "Hi.\n\n{}\nRule 7 holds."]
    if kind != "attribution_header":
        places += [
            "It is {}.",
            "It is ({}), so be quick.",
            'now="{}"',
            "Today: {};",
            "rule " * 99 + "{}",
        ]
    for place in places:
        assert shown(place.format(value)) == [(kind, value)], place


@pytest.mark.parametrize(
    ("kind", "text", "value"), [(kind, *pair) for kind, pairs in SPOKEN.items() for pair in pairs]
)
def test_what_a_text_calls_an_id_a_time_or_a_count_is_one(kind: str, text: str, value: str) -> None:
    assert shown(f"Note. {text}.\n") == [(kind, value)]


@pytest.mark.parametrize("text", LOOK_ALIKES)
def test_look_alikes_are_left_alone(text: str) -> None:
    assert shown(text) == []
    assert shown(f"See {text}, please.") == []


def test_text_without_blanks_around_a_date_is_no_part_of_it() -> None:
    assert shown("今天是2026-11-30 你好") == [("date", "2026-11-30")]
    assert shown("今天是2026年11月30日星期一") == [("date", "2026年11月30日")]


def test_a_header_counts_only_at_the_start_of_a_line_and_hides_what_is_in_it() -> None:
    text = f"{BILLING}\nYou said: {BILLING}"

    assert shown(text) == [("attribution_header", BILLING)]


def test_spans_of_several_kinds_come_in_order() -> None:
    text = f"Request {UUID} at 2026-11-30T09:00:00Z. Turn: 3. Since 2026-01-01."

    assert [kind for kind, _ in shown(text)] == ["uuid", "datetime", "counter", "date"]


def test_the_number_of_spans_is_bounded() -> None:
    text = "2026-11-30 and " * 500

    assert len(find_volatile(text)) == MAX_SPANS
    assert len(find_volatile(text, max_spans=3)) == 3
    assert find_volatile(text, max_spans=0) == []


VALUES = st.one_of(
    st.datetimes().map(lambda at: at.strftime("%Y-%m-%dT%H:%M:%SZ")),
    st.datetimes().map(lambda at: at.strftime("%A, %B %d, %Y %I:%M %p")),
    st.dates().map(str),
    st.uuids().map(str),
    st.integers(0, 10**9).map(lambda number: f"request #{number}"),
    st.text("0123456789abcdef", min_size=16, max_size=40),
)
TEXTS = st.lists(st.one_of(VALUES, st.text(max_size=30), st.sampled_from([BILLING, "\n"]))).map(
    " ".join
)


@given(TEXTS)
def test_spans_are_ordered_disjoint_and_inside_the_text(text: str) -> None:
    at = 0
    for span in find_volatile(text):
        assert at <= span.start_char < span.end_char <= len(text)
        at = span.end_char


@given(TEXTS)
def test_a_hint_never_contains_what_was_found(text: str) -> None:
    for span in find_volatile(text):
        value = text[span.start_char : span.end_char]
        assert len(span.text_hint) <= 48
        if span.kind in ("date", "datetime"):
            assert not any(char.isdigit() for char in span.text_hint)
        else:
            assert span.text_hint == f"{span.kind} of {len(value)} characters"


CLOCKS = st.datetimes().map(lambda at: at.strftime("%Y-%m-%dT%H:%M:%SZ"))
UUIDS = st.uuids().map(str)


@given(
    st.one_of(st.tuples(CLOCKS, CLOCKS), st.tuples(UUIDS, UUIDS)).filter(
        lambda pair: all(len(shown(value)) == 1 for value in pair)
    ),
    st.text(max_size=50),
)
def test_texts_that_differ_in_volatile_spans_alone_are_equal_without_them(
    pair: tuple[str, str], rest: str
) -> None:
    one, other = (skip_volatile(f"Be brief.\n{value}\n{rest}") for value in pair)

    assert one == other
    assert one != skip_volatile(f"Be brief.\n{pair[0]}\n{rest}!")


def test_a_text_without_volatile_spans_is_itself() -> None:
    text = "Refunds are accepted within 30 days."

    assert skip_volatile(text) is text


HOSTILE = {
    "digits": "1",
    "digits apart": "1 ",
    "letters": "a",
    "letters and digits": "a1",
    "ids": "a1b2c3d4e5f6g7h8i9 ",
    "dashes": "1-",
    "underscores": "a_1",
    "half a date": "2026-1",
    "weekdays": "Mon Nov ",
    "half a named date": "Nov 3 1",
    "half a uuid": "7f0c1f2e-2f0b-",
    "half a header": "x-aaa-",
    "headers": "x-a-billing-header:",
    "header lines": "\nx-a-billing-header:",
    "times": "time 1:",
    "counts": "request 1 of ",
    "blanks": " " * 50 + "1",
}


def seconds(text: str) -> float:
    return cpu_s(lambda: find_volatile(text, max_spans=10**9, max_look_chars=10**9))


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE.keys())
def test_time_is_linear_on_hostile_text(unit: str) -> None:
    small, large = (unit * (size // len(unit)) for size in (16_000, 256_000))
    floor_s = seconds(small)

    # 16 times the text; quadratic would be 256 times. Other processes share the machine.
    assert seconds(large) < 64 * floor_s + 0.02


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE.keys())
def test_beyond_the_text_looked_at_time_is_linear_too(unit: str) -> None:
    def look_s(num_chars: int) -> float:
        text = unit * (num_chars // len(unit))
        return cpu_s(lambda: find_volatile(text, max_look_chars=2048))

    floor_s = look_s(62_500)

    assert look_s(1_000_000) < 64 * floor_s + 0.05
