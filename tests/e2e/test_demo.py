"""``warmlane demo --once``: the first thing a new user runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import free_port

pytestmark = pytest.mark.slow


def run_demo(models: Path, port: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "warmlane", "demo", "--once", "--port", str(port or free_port())],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "WARMLANE_MODELS_DIR": str(models)},
    )


@pytest.mark.timeout(300)
def test_the_table_shows_hits_as_predicted_and_the_exit_code_says_so(smollm2_dir: Path) -> None:
    done = run_demo(smollm2_dir.parent)

    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\S.*?)\s{2,}(w\d)\s+(\d+)\s+(\d+) / (\d+)\s+", done.stdout, re.MULTILINE)
    assert len(rows) == 7
    warm = [row for row in rows if int(row[4]) > 0]
    assert len(warm) == 5
    assert all(abs(int(predicted) - int(observed)) <= 16 for *_, predicted, observed in rows)
    assert "5 warm requests" in done.stdout


def test_without_weights_it_says_how_to_get_them(tmp_path: Path) -> None:
    done = run_demo(tmp_path)

    assert done.returncode == 1
    assert "make weights" in done.stderr


def test_a_port_that_is_taken_is_refused_and_not_taken_for_its_own(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_demo(tmp_path, port)

    assert done.returncode == 1
    assert f"port {port}: Address already in use" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_its_engines_end_with_it(smollm2_dir: Path, end: signal.Signals) -> None:
    port = free_port()
    command = [sys.executable, "-m", "warmlane", "demo", "--port", str(port)]
    env = {**os.environ, "WARMLANE_MODELS_DIR": str(smollm2_dir.parent)}
    with subprocess.Popen(
        command,
        env=env,
        stderr=subprocess.DEVNULL,
        # Where these tests themselves run under nohup, say.
        preexec_fn=lambda: signal.signal(end, signal.SIG_DFL),
    ) as demo:
        deadline_s = time.monotonic() + 60
        while not is_listening(port) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        children = children_of(demo.pid)
        demo.send_signal(end)
        demo.wait(40)

    assert len(children) == 3
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def children_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if f"\nPPid:\t{pid}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found
