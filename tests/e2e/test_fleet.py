"""The whole thread with real parts: client, gateway, two runners, their own KV events."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter

import httpx
import openai
import pytest

from tests.e2e.fleet import Fleet, Process, cached_tokens, chat, document, wait_for, workers_of

pytestmark = pytest.mark.slow
BLOCK = 16


@pytest.fixture(scope="module")
def gateway(fleet: Fleet) -> Process:
    return fleet.gateway("exact")


def blocks_of(gateway: Process, worker: str) -> int:
    row = next(row for row in workers_of(gateway) if row["id"] == worker)
    return int(row["blocks"].get("gpu", 0))


def test_a_warm_request_goes_where_its_prefix_is_and_hits_as_predicted(gateway: Process) -> None:
    text = document("Aldbury")

    cold = chat(gateway.url, text, "When does gate 7 open?")
    warm = chat(gateway.url, text, "Whom does gate 14 admit?")

    assert cached_tokens(cold) == 0
    assert cold.headers["x-warmlane-hit-tokens"] == "0"
    predicted = int(warm.headers["x-warmlane-hit-tokens"])
    assert warm.headers["x-warmlane-worker"] == cold.headers["x-warmlane-worker"]
    assert abs(predicted - cached_tokens(warm)) <= BLOCK
    assert cached_tokens(warm) > 0.8 * warm.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("index", [0, 1])
def test_a_prefix_that_a_worker_computed_for_somebody_else_is_found(
    fleet: Fleet, gateway: Process, index: int
) -> None:
    text = document(f"Brockley {index}")
    direct = chat(fleet.runners[index].url, text, "Which gates are open?")
    assert cached_tokens(direct) == 0
    through = chat(gateway.url, text, "Which gates are shut?")

    assert through.headers["x-warmlane-worker"] == f"w{index}"
    assert abs(int(through.headers["x-warmlane-hit-tokens"]) - cached_tokens(through)) <= BLOCK
    assert cached_tokens(through) > 0


def test_both_openai_clients_work_unchanged(gateway: Process) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    question = [{"role": "user", "content": "Say hello."}]

    whole = client.chat.completions.create(
        model="smollm2", messages=question, max_tokens=8, temperature=0
    )
    pieces = client.chat.completions.create(
        model="gpt-4o-mini", messages=question, max_tokens=8, temperature=0, stream=True
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    completion = client.completions.create(model="smollm2", prompt="Once upon", max_tokens=4)

    assert whole.choices[0].message.content == text
    assert text
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 4
    assert {model.id for model in client.models.list()} == {"smollm2", "gpt-4o-mini"}


def test_curl_works_unchanged(gateway: Process) -> None:
    body = '{"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}'
    command = ["curl", "-sS", f"{gateway.url}/v1/chat/completions", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_n_samples_prefill_their_prompt_once(gateway: Process) -> None:
    text = document("Carding")

    answer = chat(gateway.url, text, "Which gates?", n=8, temperature=1.0, seed=1)

    assert len(answer.json()["choices"]) == 8
    usage = answer.json()["usage"]
    explained = explain(gateway, text, "Which gates?")
    assert explained["prompt_tokens"] == usage["prompt_tokens"]
    assert usage["completion_tokens"] <= 8 * 4


def explain(gateway: Process, text: str, question: str) -> dict:
    body = {
        "model": "smollm2",
        "messages": [
            {"role": "system", "content": text},
            {"role": "user", "content": question},
        ],
    }
    answer = httpx.post(f"{gateway.url}/admin/v1/explain", json=body, timeout=10)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_explain_says_what_the_next_request_does(gateway: Process) -> None:
    text = document("Dunmore")
    chat(gateway.url, text, "Which gates are open?")
    explained = explain(gateway, text, "Which gates are shut?")
    sent = chat(gateway.url, text, "Which gates are shut?")

    assert explained["tokens"] == "exact"
    assert explained["decision"]["worker"] == sent.headers["x-warmlane-worker"]
    assert str(explained["decision"]["hit_tokens"]) == sent.headers["x-warmlane-hit-tokens"]
    assert explained["prompt_tokens"] == sent.json()["usage"]["prompt_tokens"]


def test_a_burst_of_siblings_prefills_their_cold_document_at_most_twice(gateway: Process) -> None:
    text = document("Eastleigh", rules=40)

    async def burst() -> list[httpx.Response]:
        return await asyncio.gather(
            *(asyncio.to_thread(chat, gateway.url, text, f"Which is gate {n}?") for n in range(6))
        )

    answers = asyncio.run(burst())

    cold = [a for a in answers if cached_tokens(a) * 2 < a.json()["usage"]["prompt_tokens"]]
    assert 1 <= len(cold) <= 2


def test_a_prompt_longer_than_the_context_gets_the_engines_own_400(gateway: Process) -> None:
    answer = chat(gateway.url, document("Fairford", rules=600), "Which?")

    assert answer.status_code == 400
    assert answer.json()["error"]["type"]
    assert "8192" in answer.text
    assert {row["state"] for row in workers_of(gateway)} == {"ready"}


def test_without_events_residency_is_modelled_and_said_to_be_approximate(fleet: Fleet) -> None:
    gateway = fleet.gateway("approximate", with_events=False)
    text = document("Gosport")
    chat(fleet.runners[1].url, text, "Which gates are open?")  # nobody tells the gateway

    first = chat(gateway.url, text, "Which gates are shut?")
    second = chat(gateway.url, text, "Which gates are new?")

    assert first.headers["x-warmlane-hit-tokens"] == "0"
    assert int(second.headers["x-warmlane-hit-tokens"]) > 0
    assert second.headers["x-warmlane-worker"] == first.headers["x-warmlane-worker"]
    listed = subprocess.run(
        [sys.executable, "-m", "gateway", "workers", "list", "--gateway", gateway.url],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    assert Counter(listed.split())["approximate"] == 2


def test_a_killed_runner_costs_one_stream_and_comes_back_empty(
    fleet: Fleet, gateway: Process
) -> None:
    text = document("Hadley")
    first = chat(gateway.url, text, "Which gates are open?")
    worker = first.headers["x-warmlane-worker"]
    victim = fleet.runners[int(worker[1:])]
    wait_for(lambda: blocks_of(gateway, worker) > 0, "the index knows the blocks")

    events = stream_and_kill(gateway, victim, text)

    assert "error" in json.loads(events[-1].removeprefix("data: "))
    assert "data: [DONE]" not in events
    survivor = chat(gateway.url, text, "Which gates are shut?")
    assert survivor.status_code == 200
    assert survivor.headers["x-warmlane-worker"] != worker
    wait_for(lambda: state_of(gateway, worker) == "not_ready", "the worker is out")

    victim.start()
    victim.wait_ready()
    wait_for(lambda: state_of(gateway, worker) == "ready", "the worker is back")
    wait_for(lambda: blocks_of(gateway, worker) == 0, "its old blocks are gone")
    serve_on(gateway, worker)
    assert {row["in_flight"] for row in workers_of(gateway)} == {0}
    assert {row["queued_tokens"] for row in workers_of(gateway)} == {0}


def state_of(gateway: Process, worker: str) -> str:
    return str(next(row for row in workers_of(gateway) if row["id"] == worker)["state"])


def stream_and_kill(gateway: Process, victim: Process, text: str) -> list[str]:
    """Stream a long answer, kill its worker after the first tokens, return all events."""
    body = {
        "model": "smollm2",
        "messages": [
            {"role": "system", "content": text},
            {"role": "user", "content": "Tell me everything."},
        ],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    events = []
    with httpx.stream(
        "POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=60
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line:
                events.append(line)
            if len(events) == 3:
                victim.kill()
    return events


def serve_on(gateway: Process, worker: str) -> None:
    """Send new documents until the given worker has served one."""
    end = time.monotonic() + 30
    number = 0
    while time.monotonic() < end:
        answer = chat(gateway.url, document(f"Ilford {number}", rules=4), "Which?", max_tokens=1)
        assert answer.status_code == 200
        if answer.headers["x-warmlane-worker"] == worker:
            return
        number += 1
    raise AssertionError(f"{worker} never served again")


def test_metrics_hold_predictions_beside_observations(gateway: Process) -> None:
    text = httpx.get(f"{gateway.url}/metrics", timeout=5).text

    assert "warmlane_predicted_hit_tokens_total" in text
    assert "warmlane_observed_hit_tokens_total" in text
    for name in ("prefix_cache_hit_rate", "prefix_cache_hit_tokens", "prefix_cache_miss_tokens"):
        assert f'\n{name}{{scope="fleet",worker=""}}' in text
    # No tier below the pool: nobody measures these, so they must not read 0.
    assert "\nkv_cache_offload_read_latency{" not in text
    assert "\nkv_cache_cpu_usage_bytes{" not in text


def test_sigterm_ends_the_gateway_with_exit_code_0(fleet: Fleet) -> None:
    gateway = fleet.gateway("stopping")

    assert gateway.stop() == 0
