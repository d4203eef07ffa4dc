"""The observer sees first token, usage and end, whatever pieces the stream comes in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocols.events import events, events_from_last
from gateway.proxy.sse import MAX_HELD_BYTES, StreamObserver, usage_in_body
from gateway.routing.dispatch import Usage
from tests.fakes.engine import DONE, FINISH, ROLE, content, event, usage

EMPTY = event(id="x", choices=[])
NO_CHOICES = event(usage={"x": 1})
USAGE = event(id="x", choices=[], usage=usage(100, 1, 64))
TOOL = event(choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "A"}]}}])
REASONING = event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}])
TEXT = event(choices=[{"index": 0, "text": "a", "finish_reason": None}])
COMMENT = b": keep-alive\n\n"
ERROR = event(error={"message": "engine is out of memory", "type": "InternalServerError"})


def observe(*pieces: bytes) -> tuple[StreamObserver, bytes]:
    observer = StreamObserver()
    return observer, b"".join(observer.feed(piece) for piece in pieces)


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        pytest.param(content("a"), True, id="content"),
        pytest.param(TOOL, True, id="tool call"),
        pytest.param(REASONING, True, id="reasoning"),
        pytest.param(TEXT, True, id="text"),
        pytest.param(ROLE, False, id="role only"),
        pytest.param(EMPTY, False, id="empty choices"),
        pytest.param(NO_CHOICES, False, id="no choices"),
        pytest.param(COMMENT, False, id="comment"),
        pytest.param(FINISH, False, id="finish"),
        pytest.param(DONE, False, id="end marker"),
        pytest.param(b"data: {not json\n\n", False, id="broken"),
        pytest.param(b"data: [1]\n\n", False, id="not an object"),
        pytest.param(event(choices=None), False, id="null choices"),
        pytest.param(event(choices=[3]), False, id="choices of numbers"),
    ],
)
def test_only_content_is_a_first_token(piece: bytes, expected: bool) -> None:
    assert observe(piece)[0].has_token is expected


STREAM = b"".join([EMPTY, ROLE, content("caf\u00e9 ok"), COMMENT, FINISH, USAGE, NO_CHOICES, DONE])


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_any_split_gives_the_same_bytes_and_the_same_end(cuts: list[int], newline: bytes) -> None:
    data = STREAM.replace(b"\n", newline)
    places = [0, *sorted(cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(places)]
    observer, passed = observe(*pieces)
    end = observer.end()

    assert passed + observer.rest() == data
    assert observer.has_token
    assert (end.is_complete, end.is_error, end.usage) == (True, False, Usage(100, 1, 64))


@given(st.integers(1, len(STREAM) - 1))
def test_only_whole_events_are_passed_on(cut: int) -> None:
    observer, passed = observe(STREAM[:cut])

    assert passed == b"" or passed.endswith(b"\n\n")
    assert not observer.is_mid_event


def test_the_first_token_is_taken_when_its_event_is_complete() -> None:
    observer, _ = observe(content("caf\u00e9")[:-1])
    assert not observer.has_token
    observer.feed(b"\n")
    assert observer.has_token


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param([content("a"), FINISH, DONE], True, id="finish and marker"),
        pytest.param([content("a"), FINISH], True, id="finish without marker"),
        pytest.param([content("a", "length"), USAGE], True, id="finish with content"),
        pytest.param([content("a"), DONE], True, id="marker without finish"),
        pytest.param([content("a"), b"data: [DONE]"], True, id="marker without blank line"),
        pytest.param([content("a")], False, id="cut off"),
        pytest.param([content("a"), FINISH[:-20]], False, id="cut off in the finish event"),
        pytest.param([], False, id="nothing"),
    ],
)
def test_a_stream_is_complete_with_a_marker_or_a_finish_reason(
    pieces: list[bytes], expected: bool
) -> None:
    assert observe(*pieces)[0].end().is_complete is expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param([ERROR, DONE], True, id="then marker"),
        pytest.param([content("a"), ERROR], True, id="after content"),
        pytest.param([content('{"error":{}}'), FINISH, DONE], False, id="in the text only"),
        pytest.param([event(error=None, choices=[]), FINISH], False, id="null"),
    ],
)
def test_an_error_object_is_seen(pieces: list[bytes], expected: bool) -> None:
    assert observe(*pieces)[0].end().is_error is expected


def test_the_end_of_a_long_stream_is_read_from_its_tail_alone() -> None:
    observer, _ = observe(*[content("word " * 40)] * 2000, FINISH, USAGE, DONE)
    held = sum(map(len, observer._tail))

    assert held < 32_000
    assert observer.end().usage == Usage(100, 1, 64)


def test_an_event_larger_than_the_bound_is_passed_on_in_parts() -> None:
    huge = event(prompt_token_ids=[7] * MAX_HELD_BYTES, choices=[])
    pieces = [huge[i : i + 50_000] for i in range(0, len(huge), 50_000)]
    observer = StreamObserver()
    passed, most_held = b"", 0
    for piece in pieces[:-1]:
        passed += observer.feed(piece)
        most_held = max(most_held, len(observer.rest()))
    assert observer.is_mid_event
    passed += observer.feed(pieces[-1]) + observer.feed(content("a"))

    assert passed == huge + content("a")
    assert most_held <= MAX_HELD_BYTES
    assert observer.has_token
    assert not observer.is_mid_event


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"usage":{"prompt_tokens":3,"completion_tokens":2}}', Usage(3, 2, None)),
        (
            b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":0}}}',
            Usage(3, None, 0),
        ),
        (b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":null}}', Usage(3, None, None)),
        (b'{"usage":null}', None),
        (b'{"usage":{"prompt_tokens":null}}', None),
        (b'{"choices":[{"usage":{"prompt_tokens":3}}],"usage":{"prompt_tokens":4}}', Usage(4)),
        (b'{"text":"\\"usage\\":{\\"prompt_tokens\\":3}"}', None),
        (b'{"usage":[{"prompt_tokens":3}]}', None),
        (b'{"usage":{"prompt_tokens":3},"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"usage":{"prompt_tokens":3},"x":NaN}', None),
        (b"[]", None),
        (b"not json", None),
    ],
)
def test_usage_of_a_complete_answer(body: bytes, expected: Usage | None) -> None:
    assert usage_in_body(body) == expected


@given(
    st.lists(st.sampled_from([b"data: a", b"data:", b": c", b"id: 1", b"x", b"\n", b"\r", b"\n\n"]))
)
def test_events_from_the_last_one_on_are_the_same_events(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    assert list(events_from_last(data)) == list(events(data))[::-1]
