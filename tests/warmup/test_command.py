"""The commands as they are typed: exit codes, streams, signals, terminals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import free_port
from tests.warmup.conftest import FRAME
from tests.warmup.fake_gateway import FakeGateway, Fault
from warmup.__main__ import main

TOKEN = "s3cret-token"  # noqa: S105  # a test's own


def warmup(command: str, folder: Path, gateway: FakeGateway, *more: str) -> int:
    return main([command, str(folder / "warm.yaml"), "--gateway", gateway.url, *more])


def start(*args: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "warmup", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background may have it ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **more,
    )


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_run_that_warms_everything_exits_with_0_and_tells_each_event_in_a_line(
    folder: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert warmup("run", folder, gateway) == 0

    out, err = capsys.readouterr()
    assert out == "4 of 4 documents are warm, 0 in part, 0 not; 400 tokens computed\n"
    lines = err.splitlines()
    assert lines[0] == "warmup: plan: 4 warm; 400 tokens to compute at most"
    assert "warmup: done a.md on w0: 100 tokens, 100 computed in 0.10 s" in lines
    assert "warmup: warm d.md on w1: 100 tokens found in its cache" in lines
    assert len(lines) == 1 + 4 * 3 + 4


def test_a_second_run_computes_nothing(
    folder: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [warmup("run", folder, gateway, "--quiet") for _ in range(2)] == [0, 0]

    out, err = capsys.readouterr()
    assert out.splitlines()[1].endswith("; 0 tokens computed")
    assert err == ""


def test_what_is_not_warm_is_named_and_the_exit_code_is_3(
    folder: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "e.md").write_bytes(b"\x00")
    gateway.failing["b.md", "w1"] = "the worker refused: 500"
    gateway.unproven["c.md", "w0"] = 16

    assert warmup("run", folder, gateway, "--quiet") == 3

    out, err = capsys.readouterr()
    table = [line.split() for line in out.splitlines()]
    assert ["b.md", "w1", "failed", "0", "100", "the", "worker", "refused:", "500"] in table
    assert next(r for r in table if r[:1] == ["c.md"])[:5] == ["c.md", "w0", "cold", "16", "100"]
    assert next(r for r in table if r[:1] == ["e.md"])[2:3] == ["cold"]
    assert not any(row[:1] in (["a.md"], ["d.md"]) for row in table)
    assert "cannot warm e.md: binary" in err
    assert "failed b.md on w1: the worker refused: 500" in err


def test_what_a_later_batch_pushed_out_is_not_reported_warm(
    folder: Path,
    gateway: FakeGateway,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("warmup.items.MAX_BATCH_ITEMS", 1)
    gateway.pushed_out["d.md"] = "a.md"

    assert warmup("run", folder, gateway) == 3

    out, _ = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert rows[1][:5] == ["a.md", "w0", "cold", "0", "100"]
    assert "3 of 4 documents are warm" in out
    assert [request["dry_run"] for request in gateway.requests] == [False] * 4 + [True] * 4


def test_a_run_in_json_is_one_event_a_line_and_a_result(
    folder: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.faults.append(Fault(503, headers={"retry-after": "0"}))
    (folder / "e.md").write_bytes(b"")

    assert warmup("run", folder, gateway, "--json") == 3

    out, _ = capsys.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    kinds = [event["event"] for event in events]
    assert {"problem", "away", "plan", "start", "progress", "done", "verified"} <= set(kinds)
    result = events[-1]
    assert (result["event"], result["exit_code"], result["warm"]) == ("result", 3, 4)
    assert [d["id"] for d in result["not_warm"]] == ["e.md"]


def test_a_plan_shows_every_placement_and_the_totals(
    folder: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.held["w1"].add("a.md")

    assert warmup("plan", folder, gateway) == 0

    out, _ = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert rows[1] == ["a.md", "w1", "gpu", "100", "2.0", "KiB", "0.50", "1.50", "skip_held"]
    assert rows[2] == ["b.md", "w1", "gpu", "100", "2.0", "KiB", "0.50", "1.50", "warm"]
    assert "300 tokens to compute in 3 copies, 6.0 KiB, about 1.0 s; 1 copies are held" in out
    assert gateway.computed == []


def test_a_plan_in_json_is_one_document(
    folder: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.refused["b.md"] = "too long"
    gateway.placed["c.md"] = [
        {"id": "c.md", "worker": None, "tokens": 9, "action": "no_worker", "reason": "none fits"}
    ]

    assert warmup("plan", folder, gateway, "--json") == 3

    plan = json.loads(capsys.readouterr().out)
    assert [p["action"] for p in plan["placements"]] == ["warm", "no_worker", "warm"]
    assert plan["problems"] == [{"id": "b.md", "reason": "too long"}]
    assert plan["totals"]["tokens"] == 200


def test_verify_names_every_document_and_worker_that_is_not_warm(
    folder: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    warmup("run", folder, gateway)
    assert warmup("verify", folder, gateway) == 0
    gateway.held["w1"].discard("b.md")
    capsys.readouterr()

    assert warmup("verify", folder, gateway) == 3

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1][:5] == ["a.md", "w0", "warm", "100", "100"]
    assert rows[2][:5] == ["b.md", "w1", "cold", "0", "100"]
    assert len(gateway.computed) == 4

    assert warmup("verify", folder, gateway, "--json") == 3
    verified = json.loads(capsys.readouterr().out)
    states = {d["id"]: d["state"] for d in verified["documents"]}
    assert states == {"a.md": "warm", "b.md": "cold", "c.md": "warm", "d.md": "warm"}


def test_the_gateways_own_hot_list_is_warmed_without_a_manifest(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.hot += ["x", "y"]

    code = main(["run", "--from-live", "--limit", "5", "--gateway", gateway.url])

    assert code == 0
    assert gateway.requests[0]["from_live"] == {"limit": 5}
    assert "items" not in gateway.requests[0]
    assert capsys.readouterr().out.startswith("2 of 2 documents are warm")


def test_a_hot_list_that_is_not_kept_is_said_in_the_gateways_words(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.faults.append(Fault(400, "prompts_not_stored", "no pool has keep_warm.store: true"))

    assert main(["run", "--from-live", "--gateway", gateway.url]) == 1
    assert "no pool has keep_warm.store: true" in capsys.readouterr().err


def test_status_shows_the_gateways_runs(
    folder: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--gateway", gateway.url]) == 0
    assert "no warm-up has run" in capsys.readouterr().out
    gateway.runs.append(
        {"run_id": "r-1", "state": "done", "items": 4, "warm": 4, "partial": 0, "failed": 0,
         "computed_tokens": 4000, "elapsed_s": 2.5, "started_at": 0}
    )  # fmt: skip

    assert main(["status", "--gateway", gateway.url]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        *("r-1", "done", "4", "4", "0", "0", "4,000", "1970-01-01T00:00:00Z", "2.5", "s"),
    ]
    assert main(["status", "--gateway", gateway.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["run_id"] == "r-1"


@pytest.mark.parametrize("command", ["plan", "run", "verify"])
def test_an_unusable_manifest_is_a_usage_error_with_its_line(
    command: str, folder: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "warm.yaml").write_text("model: m\nmodell: n\n")

    assert warmup(command, folder, gateway) == 2
    assert "warm.yaml:2: modell: unknown key" in capsys.readouterr().err
    assert gateway.requests == []


@pytest.mark.parametrize(
    "args",
    [
        ["run"],
        ["run", "{m}", "--from-live"],
        ["run", "{m}", "--model", "m"],
        ["run", "{m}", "--concurrency", "0"],
        ["run", "{m}", "--max-prefill-share", "2"],
        ["run", "{m}", "--gateway", "gw:80"],
        ["run", "{m}", "--token-env", "NOT_SET_ANYWHERE"],
        ["run", "missing.yaml"],
        ["warm"],
        ["run", "{m}", "--unknown"],
    ],
)
def test_wrong_options_are_usage_errors(folder: Path, args: list[str]) -> None:
    assert main([arg.replace("{m}", str(folder / "warm.yaml")) for arg in args]) == 2


def test_an_absent_gateway_fails_the_command_when_patience_ends(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"

    for command in ("plan", "run", "verify"):
        code = main([command, str(folder / "warm.yaml"), "--gateway", url, "--timeout", "0.2"])
        assert code == 1
        err = capsys.readouterr().err
        assert f"{url}: no answer from the gateway" in err
        assert "given up after 0.2 s" in err
    assert main(["status", "--gateway", url]) == 1


def test_a_gateway_that_goes_for_good_leaves_what_is_proven_and_names_the_rest(
    folder: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.faults += [Fault(after_lines=15), *[Fault(503)] * 100]

    assert warmup("run", folder, gateway, "--timeout", "0.4") == 3

    out, err = capsys.readouterr()
    assert "2 of 4 documents are warm" in out
    assert "given up" in err


def test_the_admin_token_is_sent_and_never_printed(
    folder: Path,
    gateway: FakeGateway,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway.token = TOKEN
    monkeypatch.setenv("WARMLANE_ADMIN_TOKEN", TOKEN + "\n")
    assert warmup("run", folder, gateway) == 0
    monkeypatch.setenv("OTHER", "wr0ng")
    assert warmup("run", folder, gateway, "--token-env", "OTHER", "--json") == 1
    monkeypatch.setenv("OTHER", "wr0ng\nü")
    assert warmup("run", folder, gateway, "--token-env", "OTHER") == 2

    out, err = capsys.readouterr()
    assert gateway.authorizations == [f"Bearer {TOKEN}", "Bearer wr0ng"]
    assert TOKEN not in out + err
    assert "wr0ng" not in out + err
    assert "401" in err


def test_the_gateways_address_comes_from_flag_then_environment_then_manifest(
    folder: Path, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "warm.yaml"
    nobody = f"http://127.0.0.1:{free_port()}"
    path.write_text(f"gateway: {gateway.url}\n" + path.read_text())
    assert main(["run", str(path)]) == 0
    monkeypatch.setenv("WARMLANE_GATEWAY", nobody)
    assert main(["plan", str(path), "--timeout", "0"]) == 1
    assert main(["plan", str(path), "--gateway", gateway.url]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_waits_for_what_is_in_flight_and_says_what_is_warm(
    folder: Path, gateway: FakeGateway, number: signal.Signals
) -> None:
    gateway.gate.clear()
    child = start("run", str(folder / "warm.yaml"), "--gateway", gateway.url)
    wait_until(lambda: gateway.requests)
    assert child.stderr is not None
    child.stderr.readline()

    child.send_signal(number)
    wait_until(lambda: len(gateway.authorizations) > 1)  # it asks how the run went
    gateway.gate.set()
    out, err = child.communicate(timeout=20)

    assert child.returncode == 130
    assert "stopping" in err
    assert "0 of 4 documents are warm" in out
    assert len(gateway.computed) < 4
    rows = [line.split() for line in out.splitlines()]
    assert next(r for r in rows if r[:1] == ["a.md"])[1:3] == ["w0", "done"]


def test_a_run_that_was_killed_is_taken_up_by_the_next_one(
    folder: Path, gateway: FakeGateway
) -> None:
    gateway.pause_after = 1
    child = start("run", str(folder / "warm.yaml"), "--gateway", gateway.url)
    wait_until(lambda: len(gateway.begun) > 1)
    child.kill()
    child.communicate()
    gateway.gate.set()
    wait_until(lambda: gateway.runs[0]["state"] == "stopped")
    before = list(gateway.computed)
    assert 1 <= len(before) < 4

    assert warmup("run", folder, gateway) == 0

    assert sorted(name for name, _ in gateway.computed) == ["a.md", "b.md", "c.md", "d.md"]


def test_a_reader_who_has_seen_enough_ends_the_command_quietly(
    folder: Path, gateway: FakeGateway
) -> None:
    child = start("run", str(folder / "warm.yaml"), "--gateway", gateway.url, "--json")
    with child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.stderr is not None

        assert child.stderr.read() == ""
        assert child.wait(20) == 1


def on_terminal(folder: Path, gateway: FakeGateway, answer: bytes, *more: str) -> tuple[int, str]:
    """Run with stdin and stderr on a terminal; return the exit code and what it showed."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "warmup", "run", str(folder / "warm.yaml"),
         "--gateway", gateway.url, *more],
        stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, answer)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return child.wait(20), shown.decode()


def test_on_a_terminal_it_shows_what_it_would_cost_and_goes_on_when_told_to(
    folder: Path, gateway: FakeGateway
) -> None:
    code, shown = on_terminal(folder, gateway, b"y\n")

    assert code == 0
    assert "4 copies of 4 documents" in shown
    assert "400 tokens to compute, about 1 s" in shown
    assert [request["dry_run"] for request in gateway.requests] == [True, False]
    assert "w0" in shown
    assert "200 of 200 tokens" in shown


def test_on_a_terminal_nothing_is_warmed_without_consent(
    folder: Path, gateway: FakeGateway
) -> None:
    code, _ = on_terminal(folder, gateway, b"n\n")

    assert code == 0
    assert gateway.computed == []


def test_yes_asks_nothing_and_no_color_shows_none(folder: Path, gateway: FakeGateway) -> None:
    _, coloured = on_terminal(folder, gateway, b"", "--yes")
    code, plain = on_terminal(folder, gateway, b"", "--yes", "--no-color")

    assert code == 0
    assert "\x1b[38;5;" in coloured or "\x1b[3" in coloured
    assert "\x1b[38;5;" not in plain
    assert "\x1b[3" not in plain
    assert "Go on?" not in plain


def test_names_and_words_from_outside_steer_no_terminal(
    folder: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "\x1b[2Jx.md").write_text("x")
    gateway.refused["a.md"] = "\x1b]0;owned\x07[bold]no[/bold]\nwarmup: all is warm"

    assert warmup("run", folder, gateway) == 3

    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "\\x1b[2Jx.md" in err
    assert "\nwarmup: all is warm" not in out + err


def test_the_command_imports_nothing_heavy_for_its_help() -> None:
    code = (
        "import sys; from warmup.__main__ import main; main(['--help']); "
        "print(sorted({'httpx', 'pydantic', 'yaml', 'rich', 'orjson'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )

    assert done.stdout.splitlines()[-1] == "[]"


def test_a_manifest_of_ten_thousand_documents_needs_no_memory_for_their_texts(
    folder: Path, gateway: FakeGateway
) -> None:
    # 200 MB if all texts were held at once.
    (folder / "many").mkdir()
    (folder / "many" / "d0.txt").write_text("word " * 4000)
    for number in range(1, 10_000):
        os.link(folder / "many" / "d0.txt", folder / "many" / f"d{number}.txt")
    (folder / "warm.yaml").write_text('model: m\ndocuments: [{glob: "many/*"}]\n' + FRAME)
    script = (
        "import re, sys; from pathlib import Path; from warmup.__main__ import main; "
        "code = main(sys.argv[1:]); status = Path('/proc/self/status').read_text(); "
        # Not getrusage: its maximum includes what the parent held when it forked.
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]) >> 10); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", str(folder / "warm.yaml"), "--gateway", gateway.url],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip

    assert max(map(len, gateway.ids())) <= 256
    assert sum(map(len, gateway.ids())) == 10_000
    assert int(done.stdout.splitlines()[-1]) < 200
