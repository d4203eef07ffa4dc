"""Errors: the tree as drawn, OpenAI's shape, and what tells a client whether to try again."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from gateway import errors
from gateway.errors import GatewayError, PoolUnavailable, WorkerFailed, error_for_status

CLASSES = {
    name: cls
    for name, cls in vars(errors).items()
    if inspect.isclass(cls) and issubclass(cls, Exception)
}


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = re.findall(
        r"^ {4}((?:[|+]?[ -]{3})*)(\w+)(?:$| {2,})(\d{3})?", errors.__doc__ or "", re.M
    )
    parents: dict[int, str] = {}
    for indent, name, status in drawn:
        depth = len(indent) // 4
        parents[depth] = name
        cls = CLASSES[name]
        parent = parents[depth - 1] if depth else "Exception"
        assert cls.__bases__[0].__name__ == parent
        if status:
            assert issubclass(cls, GatewayError)
            assert cls.status == int(status)

    assert {name for _, name, _ in drawn} == CLASSES.keys()


GATEWAY_ERRORS = [cls for cls in CLASSES.values() if issubclass(cls, GatewayError)]


@pytest.mark.parametrize("cls", GATEWAY_ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_has_openais_body(cls: type[GatewayError]) -> None:
    error = cls("what happened", param="model", code="some_code")

    assert json.loads(error.openai_body()) == {
        "error": {
            "message": "what happened",
            "type": error.type,
            "param": "model",
            "code": "some_code",
        }
    }
    assert error.event() == b"data: " + error.openai_body() + b"\n\n"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WorkerFailed("x"), {}),
        (WorkerFailed("x", should_retry=False), {"x-should-retry": "false"}),
        (PoolUnavailable("x"), {"retry-after": "2", "retry-after-ms": "2000"}),
        (
            PoolUnavailable("x", retry_after_s=0.25, should_retry=True),
            {"retry-after": "1", "retry-after-ms": "250", "x-should-retry": "true"},
        ),
    ],
)
def test_headers_say_whether_and_when_to_try_again(
    error: GatewayError, expected: dict[str, str]
) -> None:
    assert dict(error.http_headers()) == expected


@pytest.mark.parametrize("status", [400, 404, 405, 408, 413, 417, 418, 431, 500, 502, 503, 505])
def test_a_foreign_status_keeps_its_number_and_gets_a_fitting_type(status: int) -> None:
    error = error_for_status(status, "m")

    assert error.status == status
    assert (error.type == "api_error") == (status in (500, 502, 505))
