"""The log: what is on its page is what is written, at every level."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import structlog

import gateway
from gateway import launch
from gateway.proxy.api import MAX_MODEL_CHARS
from gateway.runtime import configure_logs
from gateway.settings import load
from gateway.telemetry.failures import MAX_CAUSES, MAX_FRAMES, failure
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.request_log import RequestLog
from gateway.tracing import names
from gateway.unsupported import unsupported
from tests.fakes.engine import RawEngine, openai_engine
from tests.gateway.private_parts import events, writing
from tests.gateway.tenancy_parts import CHAT, asking, respond, serving
from tests.gateway.test_cases_security import records_of

ROOT = Path(__file__).resolve().parents[2]
LOGS = (ROOT / "docs" / "logs.md").read_text("utf-8")
TRACES = (ROOT / "docs" / "traces.md").read_text("utf-8")


def named_in(text: str, column: int = 1) -> set[str]:
    """Return what stands in backticks in a column of the tables of a text."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[column - 1])}


def section(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def emitted() -> set[str]:
    """Return the events that the gateway's code can write."""
    found = set()
    for path in Path(gateway.__file__).parent.rglob("*.py"):
        if path.parts[-2] in ("replay", "demo"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("debug", "info", "warning", "error", "exception")
                and node.args
                and isinstance(event := getattr(node.args[0], "value", None), str)
            ):
                found.add(event)
    return found


async def test_the_page_names_every_field_of_a_requests_line(tmp_path: Path, capfd: Any) -> None:
    async with RawEngine(respond) as worker, writing(tmp_path, capfd, worker) as written:
        await written.gw.post(CHAT, asking(), {"x-request-id": "mine"})
    (line,) = events(written.surfaces["stderr"])

    assert set(line) == named_in(section(LOGS, "The line of a request"))
    assert line["request_id"] == "mine"
    assert re.fullmatch(r"[0-9a-f]{32}", line["trace_id"])
    assert (line["pool"], line["worker"], line["outcome"], line["status"]) == (
        "chat",
        "w0",
        "ok",
        200,
    )
    assert (line["prompt_tokens"], line["observed_hit_tokens"], line["completion_tokens"]) == (
        40,
        0,
        10,
    )
    assert line["duration_s"] >= line["route_s"] > 0


def test_the_page_names_every_event_and_no_other() -> None:
    assert named_in(section(LOGS, "Events")) == emitted()


def test_the_pages_of_traces_name_every_attribute() -> None:
    told = set(re.findall(r"`([a-z_.]+)`", section(TRACES, "Attributes")))
    known = {
        value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)
    }

    assert known <= told
    assert {name for name in told if name.count(".") and not name.startswith("telemetry.")} <= known


async def test_other_requests_leave_no_line(tmp_path: Path, capfd: Any) -> None:
    async with RawEngine(respond) as worker, writing(tmp_path, capfd, worker) as written:
        await written.gw.post(CHAT, asking())
        for path in ("/health", "/health/ready", "/v1/models", "/nothing", "/admin/v1/workers"):
            await written.gw.get(path)
    assert [line["event"] for line in events(written.surfaces["stderr"])] == ["request_finished"]


async def test_a_name_as_long_as_a_body_is_cut() -> None:
    async with openai_engine() as engine, serving(engine) as gw:
        records = records_of(gw)
        status, _, _ = await gw.post(CHAT, asking() | {"model": "m" * 100_000})

    assert status == 404
    assert [len(record.model) for record in records] == [MAX_MODEL_CHARS]


# Levels.


@pytest.fixture
def _own_logs() -> Any:
    """Give structlog and Python's own logging back as they were."""
    config, handlers = structlog.get_config(), logging.root.handlers[:]
    yield
    structlog.configure(**config)
    logging.root.handlers[:] = handlers


LEVELS = ["debug", "info", "warning", "error"]


@pytest.mark.usefixtures("_own_logs")
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_below_the_level_is_not_written(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs(level)
    log = structlog.get_logger("a test's own")
    for each in LEVELS:
        getattr(log, each)(each, number=1)
    logging.getLogger("urllib3").warning("of %s", "a library")
    logging.getLogger("urllib3").error("of %s\nand more", "a library")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    written = LEVELS[LEVELS.index(level) :]
    assert [line["event"] for line in lines if line["event"] != "library"] == written
    assert [line["what"] for line in lines if line["event"] == "library"] == [
        "of %s" for each in ("warning", "error") if each in written
    ]
    assert all(set(line) >= {"event", "level", "timestamp"} for line in lines)


@pytest.mark.usefixtures("_own_logs")
@pytest.mark.parametrize("level", LEVELS)
def test_only_debug_has_what_an_exception_says(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs(level)
    try:
        raise KeyError("CANARY")
    except KeyError as error:
        structlog.get_logger("another").error("it_failed", exc_info=error)
        logging.getLogger("aiohttp.server").exception("Error handling %s", "CANARY-REQUEST")
    said = capsys.readouterr().err

    assert ("KeyError: 'CANARY'" in said) == (level == "debug")
    assert "CANARY-REQUEST" not in said
    assert "KeyError" in said
    assert len(said.splitlines()) == 2


@pytest.mark.parametrize("level", LEVELS)
async def test_request_lines_are_of_level_info(
    level: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with openai_engine() as engine, serving(engine, telemetry={"log_level": level}) as gw:
        await gw.post(CHAT, asking())
    lines = events(capfd.readouterr().err.encode())

    assert len(lines) == (level in ("debug", "info"))


@pytest.mark.parametrize("allowed", [False, True])
def test_a_gateway_that_logs_prompts_says_so_when_it_starts(allowed: bool) -> None:
    flags = {
        ("pools",): [{"name": "chat", "models": ["m"]}],
        ("telemetry",): {"log_prompts": allowed},
    }
    settings, _ = load(None, flags=flags, environ={})
    with structlog.testing.capture_logs() as logs:
        launch._warn(settings, unsupported(settings)[1])

    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("prompts_are_logged", "warning")
    ] * allowed


async def test_every_line_is_json_whatever_clients_write() -> None:
    stream = io.BytesIO()
    log = RequestLog(stream)
    odd = [
        '"quotes"',
        "\\back\\",
        "new\nline",
        "\u2028",
        "\x00",
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    ]
    for text in odd:
        log.write([(0.0, RequestRecord(text, "chat", tenant=text, model=text, pool=text))])
    lines = stream.getvalue().split(b"\n")[:-1]

    assert [json.loads(line)["model"] for line in lines] == odd


def test_a_failure_names_its_causes_and_calls_and_is_bounded() -> None:
    def fail(depth: int) -> None:
        if depth:
            fail(depth - 1)
        try:
            raise KeyError("CANARY")
        except KeyError as error:
            raise ValueError("CANARY") from error

    try:
        fail(100)
    except ValueError as error:
        error.__cause__.__cause__ = error  # type: ignore[union-attr]  # a circle
        told = failure(error)

    assert told["error"] == ["ValueError", "KeyError", "ValueError", "KeyError"][:MAX_CAUSES]
    assert len(told["at"]) == MAX_FRAMES
    assert re.fullmatch(r"gateway/test_logs\.py:\d+ fail", told["at"][-1])
    assert "CANARY" not in json.dumps(told)
