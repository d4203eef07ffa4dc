"""``warmlane replay`` as an operator uses it, and the examples of its page."""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from gateway.replay.command import replay
from gateway.replay.fleet import Fleet
from gateway.replay.ours import OursRouter
from gateway.replay.presets import LLAMA_8B
from gateway.replay.shared_load import Hub
from gateway.replay.simulate import Load, Simulation
from gateway.routing.decision_line import decision_line
from tests.gateway.replay_parts import AGENTIC, CONVERSATION, conversation

DOCS = Path(__file__).parents[2] / "docs" / "replay.md"
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(replay)


def command(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "200", "TERM": "dumb"})


def said(result: Result) -> str:
    """What was said, without the frame that usage errors are drawn in."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


@pytest.fixture(scope="module")
def decision_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decisions of our own gateway on real traffic, as its log has them."""
    fleet = Fleet(LLAMA_8B, 4)
    router = OursRouter(fleet, Hub(1, is_shared=True), seed=1)
    served = Simulation(conversation().requests, fleet, router, Load(scale=3.0)).run()
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    lines = []
    for one in served:
        assert one.placement is not None
        plan, ticket = one.placement.token  # type: ignore[misc]
        lines.append(decision_line(plan, ticket, unix_offset_s=1.7e9).to_json())
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_a_table_has_one_row_for_each_policy_and_load() -> None:
    result = command(CONVERSATION, "--workers", "4", "--policy", "ours,llmd", "--load", "1,2")

    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[1:]]
    assert [row[:2] for row in rows if row[0] in ("ours", "llmd")] == [
        ["ours", "1"],
        ["llmd", "1"],
        ["ours", "2"],
        ["llmd", "2"],
    ]
    assert result.stderr == ""


def test_json_is_one_document_with_everything_that_was_assumed() -> None:
    result = command(
        *(AGENTIC, "--json", "--workers", "4", "--policy", "ours", "--replicas", "2"),
        *("--load-delay", "100ms", "--draws", "2", "--engine-model", "70b"),
        *("--cpu-tokens", "400000", "--slo-ttft", "5s", "--slo-tpot", "100ms", "--load", "5"),
    )
    document = json.loads(result.stdout)

    assert document["trace"] == {
        "name": "agentic-sessions",
        "format": "compact",
        "requests": 256,
        "notes": [],
    }
    assert (document["replicas"], document["load_delay_s"], document["draws"]) == (2, 0.1, 2)
    assert document["engine_model"]["cpu_tokens"] == 400_000
    assert document["slo"] == {"ttft_s": 5.0, "tpot_s": 0.1}
    (only,) = document["runs"]
    assert only["num_requests"] == 230
    assert 0.0 < only["ttft_p50_s"] <= only["ttft_p95_s"] <= only["ttft_p99_s"]
    assert 0.0 < only["goodput"] <= 1.0
    assert only["predicted_hit_rate"] == pytest.approx(only["hit_rate"], abs=0.02)


@pytest.mark.parametrize("name", ["plot.html", "plot.svg"])
def test_a_plot_is_one_page_with_a_line_for_each_policy(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    result = command(
        *(CONVERSATION, "--workers", "4", "--policy", "least_requests,random"),
        *("--load", "2", "--plot", str(path)),
    )
    text = path.read_text("utf-8")
    parser = HTMLParser()
    parser.feed(text)

    assert result.exit_code == 0
    assert text.count("<polyline") == 4
    # Four loads around the one that was asked for.
    assert text.count("<circle") == 16
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in text


def test_failures_scaling_peers_and_a_store_can_be_asked_for_together() -> None:
    result = command(
        *(AGENTIC, "--json", "--workers", "4", "--policy", "ours", "--load", "10"),
        *("--fail", "60s:20s:1", "--scale", "2m:+2", "--scale", "4m:-1"),
        *("--peer-pull", "12.5", "--store", "25", "--store-tokens", "1000000"),
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout)["runs"][0]["num_requests"] == 230


def test_the_capacity_is_said_for_each_policy() -> None:
    args = CONVERSATION, "--workers", "2", "--policy", "round_robin", "--slo-capacity"
    found = json.loads(command(*args, "--json").stdout)["capacity"]["round_robin"]

    assert 0.1 < found < 10.0
    hopeless = command(*args, "--slo-ttft", "1e-9s").stdout
    assert hopeless == "round_robin: no load meets the objective\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--workers", "0"), "--workers: must be 1 to 4096, not 0"),
        (("--workers", "5000"), "--workers: must be 1 to 4096, not 5000"),
        (("--replicas", "0"), "--replicas: must be 1 to 256, not 0"),
        (("--draws", "-1"), "--draws: must be 0 to 1000, not -1"),
        (("--load", "0"), "--load: must be above 0, not 0"),
        (("--load", "1,-2"), "--load: must be above 0, not -2"),
        (("--load", "nan"), "--load: must be above 0, not nan"),
        (("--load", "inf"), "--load: must be above 0, not inf"),
        (("--load", "fast"), "--load: expected a number, not 'fast'"),
        (("--load-delay", "5 parsecs"), "--load-delay: expected a duration such as 50ms or 2s"),
        (("--load-delay", "0ms"), "--load-delay: must be above 0, or none"),
        (("--load-delay", "1.2.3s"), "--load-delay: expected a duration"),
        (("--peer-pull", "0"), "--peer-pull: must be above 0"),
        (("--store", "x"), "--store: expected a number, not 'x'"),
        (("--store", "1", "--store-tokens", "3"), "--store-tokens: must be 512 to"),
        (("--cpu-tokens", "-1"), "--cpu-tokens: must be 0 to"),
        (("--disk-tokens", "5"), "--disk-tokens: needs --cpu-tokens above 0"),
        (("--fail", "3s"), "--fail: expected TIME:DURATION[:WORKERS]"),
        (("--fail", "3s:4s:99"), "--fail: WORKERS must be 1 to 16, not 99"),
        (("--fail", "3s:4s:x"), "--fail: expected a whole number, not 'x'"),
        (("--scale", "3s:2"), "--scale: expected TIME:+WORKERS or TIME:-WORKERS, not '3s:2'"),
        (("--scale", "3s:-16"), "--scale: at most 15 of 16 workers can go"),
        (("--scale", "9s:-9", "--scale", "3s:-9"), "--scale: at most 6 of 7 workers can go"),
        (("--policy", "best"), "unknown policy 'best': expected one of ours"),
        (("--policy", "dynamo:x=1"), "dynamo has no setting 'x'"),
        (("--plot", "x.gif"), "--plot: expected FILE.html or FILE.svg, not 'x.gif'"),
        (("--engine-model", "9b"), "--engine-model: 9b: expected 8b, 70b or a JSON file"),
        (("--slo-ttft", "soon"), "--slo-ttft: expected a duration such as 50ms or 2s, not 'soon'"),
    ],
)
def test_an_impossible_option_is_refused_with_its_bound(
    args: tuple[str, ...], message: str
) -> None:
    result = command(CONVERSATION, *args)

    assert result.exit_code == 2
    assert message in said(result)


def test_a_broken_trace_ends_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("[0,1100,20,7,-1,0,0,[5,2]]\n[0,1100,20,7]\n")
    result = command(str(path))

    assert result.exit_code == 1
    assert "trace.jsonl:2: expected a compact row like the first" in result.stderr
    assert result.stdout == ""


def test_a_workload_that_never_fits_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("[0,500000,20,7,-1,0,0,[5,976]]\n")
    result = command(str(path))

    assert result.exit_code == 1
    assert "trace.jsonl:1: a request of 500000 + 20 tokens never fits" in result.stderr
    assert "399872 tokens of KV memory" in result.stderr


def test_the_own_decision_log_is_a_trace(decision_log: Path) -> None:
    result = command(str(decision_log), "--json", "--workers", "4", "--policy", "ours")
    document = json.loads(result.stdout)

    assert document["trace"]["format"] == "decisions"
    assert document["trace"]["requests"] == 400
    original = command(CONVERSATION, "--json", "--workers", "4", "--policy", "ours", "--load", "3")
    hit_rate = json.loads(original.stdout)["runs"][0]["hit_rate"]
    assert document["runs"][0]["hit_rate"] == pytest.approx(hit_rate, rel=0.1)


def test_every_logged_decision_is_taken_again_alike(decision_log: Path) -> None:
    result = command(str(decision_log), "--check-decisions")

    assert result.exit_code == 0
    assert result.stdout == "400 decisions, 0 different\n"


@pytest.mark.parametrize(
    ("field", "value"),
    [("worker", "w9"), ("reason", "home?"), ("hit_tokens", 7), ("predicted_ttft_s", 9.5)],
)
def test_a_decision_that_comes_out_differently_is_named(
    decision_log: Path, tmp_path: Path, field: str, value: object
) -> None:
    lines = decision_log.read_text().splitlines()
    lines[41] = json.dumps(json.loads(lines[41]) | {field: value})
    path = tmp_path / "changed.jsonl"
    path.write_text("\n".join(lines))
    result = command(str(path), "--check-decisions")

    assert result.exit_code == 1
    assert f"changed.jsonl:42: {field}: logged {value}, taken again" in result.stdout
    assert result.stdout.endswith("400 decisions, 1 different\n")
    document = json.loads(command(str(path), "--check-decisions", "--json").stdout)
    assert (document["decisions"], document["different"]) == (400, 1)
    assert document["differences"][0]["line"] == 42


def test_only_a_decision_log_can_be_checked(tmp_path: Path) -> None:
    result = command(CONVERSATION, "--check-decisions")
    assert result.exit_code == 1
    assert "conversation-400.jsonl.gz:1: expected a decision line" in result.stderr
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert "the file is empty" in command(str(empty), "--check-decisions").stderr


def examples() -> list[str]:
    text = DOCS.read_text("utf-8")
    return re.findall(r"^warmlane replay (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("example", examples())
def test_the_examples_of_the_page_work(
    example: str, decision_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "decisions.jsonl").write_bytes(decision_log.read_bytes())
    (tmp_path / "trace.jsonl.gz").write_bytes(Path(CONVERSATION).read_bytes())
    (tmp_path / "engine.json").write_text(engine_example())
    result = command(*shlex.split(example))

    assert result.exit_code == 0, result.output


def engine_example() -> str:
    found = re.search(r"```json\n(.+?)```", DOCS.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1]
