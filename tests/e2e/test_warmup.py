"""The command against a real gateway and two real engines with real weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.fleet import Fleet, Process, chat, document, running_fleet, wait_for, workers_of

# Loading the weights of two engines at once takes a while on a busy box.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
BLOCK = 16
# As `chat` of the fleet's tests sends them: the document is the system text.
FRAME = """
frame:
  system: "{document}"
  messages: [{role: user, content: "{question}"}]
  body: {max_tokens: 4, temperature: 0}
"""


@pytest.fixture(scope="module")
def fleet(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Engines whose caches hold nothing of other tests: what is computed is counted here."""
    with running_fleet(tmp_path_factory.mktemp("warmup"), smollm2_dir) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def gateway(fleet: Fleet) -> Process:
    return fleet.gateway("warmup")


def write(folder: Path, names: list[str], rules: int = 12, copies: int = 1) -> Path:
    """Write documents and a manifest of them."""
    for name in names:
        (folder / f"{name}.md").write_text(document(name, rules))
    path = folder / "warm.yaml"
    path.write_text(
        f'model: smollm2\ndefaults: {{copies: {copies}}}\ndocuments: [{{glob: "*.md"}}]\n{FRAME}'
    )
    return path


def warmup(
    command: str, manifest: Path, gateway: Process, *more: str
) -> subprocess.CompletedProcess[str]:
    args = [command, str(manifest), "--gateway", gateway.url, *more]
    return subprocess.run(
        [sys.executable, "-m", "warmup", *args],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def computed(fleet: Fleet) -> float:
    """Return the prompt tokens that the engines have computed, and not found in their caches."""
    total = 0.0
    for runner in fleet.runners:
        if runner.child is None:
            continue
        for line in httpx.get(f"{runner.url}/metrics", timeout=5).text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("vllm:prompt_tokens_total"):
                total += float(value)
            elif name.startswith("vllm:prefix_cache_hits_total"):
                total -= float(value)
    return total


def cached_share(answer: httpx.Response) -> float:
    usage = answer.json()["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


def test_warmed_documents_are_hits_for_their_first_users_and_a_second_run_computes_nothing(
    fleet: Fleet, gateway: Process, tmp_path: Path
) -> None:
    names = ["Ashby", "Barton", "Cotham", "Denham"]
    manifest = write(tmp_path, names)
    cold = warmup("verify", manifest, gateway, "--json")
    assert cold.returncode == 3, cold.stderr
    before = computed(fleet)

    first = warmup("run", manifest, gateway, "--json")

    assert first.returncode == 0, first.stdout + first.stderr
    done = result(first)
    assert (done["warm"], done["documents"]) == (4, 4)
    assert done["computed_tokens"] > 4 * 200
    assert computed(fleet) - before < done["computed_tokens"] + 4 * 2 * BLOCK

    before = computed(fleet)
    second = warmup("run", manifest, gateway, "--json")
    assert second.returncode == 0
    assert result(second)["computed_tokens"] == 0
    assert computed(fleet) - before <= 4 * BLOCK  # the last block of each probe

    verified = warmup("verify", manifest, gateway, "--json")
    assert verified.returncode == 0, verified.stdout
    rows = json.loads(verified.stdout)["documents"]
    assert all(copy["cached_tokens"] >= copy["wanted_tokens"] for r in rows for copy in r["copies"])
    for name in names:
        answer = chat(gateway.url, document(name, 12), f"What is the first rule of {name}?")
        assert cached_share(answer) > 0.9


def test_copies_lie_on_as_many_workers_and_each_is_proven(
    fleet: Fleet, gateway: Process, tmp_path: Path
) -> None:
    manifest = write(tmp_path, ["Elmore"], copies=2)
    plan = json.loads(warmup("plan", manifest, gateway, "--json").stdout)
    assert {p["worker"] for p in plan["placements"]} == {"w0", "w1"}

    assert warmup("run", manifest, gateway).returncode == 0

    for runner in fleet.runners:
        assert cached_share(chat(runner.url, document("Elmore", 12), "Which?")) > 0.9


def test_what_cannot_be_warmed_is_named_and_the_rest_is_warm(
    gateway: Process, tmp_path: Path
) -> None:
    manifest = write(tmp_path, ["Farley"])
    (tmp_path / "long.md").write_text(document("Gotham", 600))
    (tmp_path / "scan.md").write_bytes(b"%PDF\x00")

    done = result(warmup("run", manifest, gateway, "--json"))

    assert done["exit_code"] == 3
    assert done["warm"] == 1
    rows = {row["id"]: str(row) for row in done["not_warm"]}
    assert "binary" in rows["scan.md"]
    assert "context" in rows["long.md"], rows


def test_an_unknown_model_is_named(gateway: Process, tmp_path: Path) -> None:
    manifest = write(tmp_path, ["Hanley"])
    manifest.write_text(manifest.read_text().replace("smollm2", "nosuch"))

    done = warmup("run", manifest, gateway)

    assert done.returncode in (1, 3)
    assert "nosuch" in done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_ended_half_way_is_taken_up_where_it_was(
    fleet: Fleet, gateway: Process, tmp_path: Path, number: signal.Signals
) -> None:
    # Seconds of work behind the first document: the signal has to come in the middle.
    names = [f"Iver{number}{letter}" for letter in "abcdefghijkl"]
    manifest = write(tmp_path, names, rules=24)
    plan = json.loads(warmup("plan", manifest, gateway, "--json").stdout)
    before = computed(fleet)
    child = subprocess.Popen(
        [sys.executable, "-m", "warmup", "run", str(manifest), "--gateway", gateway.url, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Whoever runs the tests in the background may have it ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert child.stdout is not None
    for line in child.stdout:
        if json.loads(line)["event"] == "done":
            break
    child.send_signal(number)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    if number == signal.SIGINT:
        assert json.loads(out.splitlines()[-1])["exit_code"] == 130
    wait_for(lambda: not is_running(gateway), "the gateway stops the run")
    half = computed(fleet) - before
    assert 0 < half < plan["totals"]["tokens"]

    done = result(warmup("run", manifest, gateway, "--json"))

    assert (done["exit_code"], done["warm"]) == (0, len(names))
    assert done["computed_tokens"] < plan["totals"]["tokens"]
    assert computed(fleet) - before < plan["totals"]["tokens"] + len(names) * 3 * BLOCK


def is_running(gateway: Process) -> bool:
    runs = httpx.get(f"{gateway.url}/admin/v1/warm", timeout=5).json()["runs"]
    return any(run["state"] in ("running", "stopping") for run in runs)


def test_a_worker_that_dies_is_named_and_the_others_documents_are_warm(
    fleet: Fleet, gateway: Process, tmp_path: Path
) -> None:
    names = [f"Kirby{letter}" for letter in "abcdefgh"]
    manifest = write(tmp_path, names, rules=24)
    plan = json.loads(warmup("plan", manifest, gateway, "--json").stdout)
    places = {p["id"]: p["worker"] for p in plan["placements"]}
    victim = max(("w0", "w1"), key=list(places.values()).count)
    child = subprocess.Popen(
        [sys.executable, "-m", "warmup", "run", str(manifest), "--gateway", gateway.url, "--json",
         "--concurrency", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    for line in child.stdout:
        event = json.loads(line)
        if event["event"] == "start" and event["worker"] == victim:
            break
    fleet.runners[int(victim[1])].kill()
    out, err = child.communicate(timeout=60)

    last = json.loads(out.splitlines()[-1])
    assert last["exit_code"] == child.returncode == 3, err
    failed = {row["id"] for row in last["not_warm"]}
    assert failed
    assert all(victim in str(row["copies"]) for row in last["not_warm"])
    assert failed <= {name for name, worker in places.items() if worker == victim}
    assert last["warm"] == 8 - len(failed)

    runner = fleet.runners[int(victim[1])]
    runner.start()
    runner.wait_ready()
    wait_for(lambda: is_back(gateway, victim), "the worker is back, and empty", deadline_s=60)
    again = result(warmup("run", manifest, gateway, "--json"))
    assert (again["exit_code"], again["warm"]) == (0, 8), again["not_warm"]


def is_back(gateway: Process, worker: str) -> bool:
    row = next(row for row in workers_of(gateway) if row["id"] == worker)
    return bool(row["ready"]) and row["blocks"].get("gpu", 0) == 0
