"""Take the decisions of a decision log again, from the log alone, and report what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gateway.replay.traces import TraceError, lines_of
from gateway.routing.choose import RouteInput, choose
from gateway.telemetry.decision_log import DecisionLine

if TYPE_CHECKING:
    from collections.abc import Iterator

# Predictions equal to this relative difference are the same number.
SAME = 1e-9


class Difference(NamedTuple):
    """A decision that comes out differently.

    Attributes:
        line: Line in the file.
        field: What differs: worker, reason, source, hit_tokens or predicted_ttft_s.
        logged: As logged.
        taken: As taken again.
    """

    line: int
    field: str
    logged: object
    taken: object


def check_decisions(path: str) -> tuple[int, list[Difference]]:
    """Take every decision of a log again.

    Returns:
        Lines read, and the differences in the order of the file; one decision may have several.

    Raises:
        TraceError: If a line is none of a decision log; names file and line.
    """
    count = 0
    differences: list[Difference] = []
    for number, data in lines_of(path):
        count += 1
        try:
            line = DecisionLine.from_json(data)
            request = msgspec.convert(line.input, RouteInput)
        except (ValueError, msgspec.ValidationError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        differences += _differences(number, line, request)
    if not count:
        raise TraceError(f"{path}: expected one decision a line; the file is empty")
    return count, differences


def _differences(number: int, line: DecisionLine, request: RouteInput) -> Iterator[Difference]:
    decision = choose(request, rotation=line.rotation)
    pairs = {
        "worker": (line.worker, decision.worker),
        "reason": (line.reason, str(decision.reason)),
        "source": (line.source, decision.source),
        "hit_tokens": (line.hit_tokens, decision.hit_tokens),
        "predicted_ttft_s": (line.predicted_ttft_s, decision.ttft_s),
    }
    for field, (logged, taken) in pairs.items():
        if not _is_same(logged, taken):
            yield Difference(number, field, logged, taken)


def _is_same(left: object, right: object) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) <= SAME * max(abs(left), abs(right))
    return left == right
