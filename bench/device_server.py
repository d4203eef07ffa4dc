"""The stage of ``device_check.py`` that starts a whole runner and asks it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.device_parts import Machine

ROOT = Path(__file__).resolve().parent.parent

START_S = 60.0
ANSWER_S = 60.0
NUM_TOKENS = 24
TEXT = "A prefix cache keeps the keys and values of tokens it has seen. "
PROMPTS = ("The capital of France is", TEXT * 3 + "In short,", TEXT * 3 + "Therefore")


def server(machine: Machine) -> dict[str, Any]:
    """Greedy tokens of a runner on the device, cold and warm, against a float32 one on the CPU."""
    model = ROOT / "models" / "smollm2"
    if not model.is_dir():
        raise FileNotFoundError(f"{model}: the demo weights are not there")
    device = machine.pick("cuda", "cpu")
    prompts = machine.pick(PROMPTS, PROMPTS[:1])
    answers = {name: _ask_runner(model, name, prompts) for name in dict.fromkeys((device, "cpu"))}
    got, expected = answers[device], answers["cpu"]
    same = [one == other for one, other in zip(got["texts"], expected["texts"], strict=True)]
    facts = {"device": device, "start_s": got["start_s"], "same_text": same}
    if not all(same):
        raise AssertionError(f"{facts}: {got['texts']} against {expected['texts']}")
    return facts | {"cached_tokens": got["cached_tokens"], "answer_s": got["answer_s"]}


def _ask_runner(model: Path, device: str, prompts: tuple[str, ...]) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "runner", "--model", str(model), "--port", str(port)]
    command += ["--device", device, "--pool-tokens", "4096"]
    begun_s = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            _wait_until_up(process, port, begun_s + START_S)
            start_s = time.monotonic() - begun_s
            # Each prompt twice: computed, then from the cache.
            asked = [_complete(port, prompt) for prompt in prompts for _ in range(2)]
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
    return {
        "start_s": round(start_s, 2),
        "texts": [text for text, _, _ in asked],
        "cached_tokens": [cached for _, cached, _ in asked],
        "answer_s": [round(elapsed_s, 3) for _, _, elapsed_s in asked],
    }


def _wait_until_up(process: subprocess.Popen[str], port: int, end_s: float) -> None:
    while time.monotonic() < end_s:
        if process.poll() is not None:
            said = process.stderr.read() if process.stderr is not None else ""
            raise RuntimeError(f"the runner ended with {process.returncode}: {said[-500:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"the runner did not answer within {START_S:.0f} s")


def _complete(port: int, prompt: str) -> tuple[str, int, float]:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    begun_s = time.monotonic()
    # Our own address, made above.
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:  # noqa: S310
        answer = json.load(response)
    details = answer["usage"].get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens", 0)
    return answer["choices"][0]["text"], cached, time.monotonic() - begun_s
