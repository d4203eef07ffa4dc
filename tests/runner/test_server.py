"""The runner's HTTP surface with the real engine and weights, through real clients."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import zmq
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from prometheus_client.parser import text_string_to_metric_families

from prefix_index.events import BlockStored, EventBatch, decode_batch
from prefix_index.tokens import PromptTokenizer
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.live_runner import LiveRunner

MODEL = "smollm2"
QUESTION: list[Any] = [{"role": "user", "content": "Name three colours."}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}


@pytest.fixture
async def client(live_runner: LiveRunner) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{live_runner.url}/v1", api_key="-", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture
async def http(live_runner: LiveRunner) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=live_runner.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> PromptTokenizer:
    return PromptTokenizer.from_dir(smollm2_dir)


def decode(live_runner: LiveRunner, ids: list[int]) -> str:
    return live_runner.runner.service.detokenizer.decode(ids)


def replay(endpoint: str | None) -> list[EventBatch]:
    """All batches the publisher still has."""
    assert endpoint is not None
    batches = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.setsockopt(zmq.RCVTIMEO, 5_000)
        asker.connect(endpoint)
        asker.send_multipart([b"", bytes(8)])
        while (answer := asker.recv_multipart())[3]:
            batches.append(decode_batch(answer[3]))
    return batches


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json=GREEDY | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON events of a stream; it must end with [DONE]."""
    response = await http.post(path, json=body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_chat_answer_has_text_finish_reason_and_usage(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(messages=QUESTION, **GREEDY)

    choice = answer.choices[0]
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


async def test_a_stream_says_the_same_as_the_whole_answer(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(messages=QUESTION, **GREEDY)
    stream = await client.chat.completions.create(
        messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [chunk async for chunk in stream]

    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == (
        whole.choices[0].message.content
    )
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    assert all(part.usage is None for part in parts)
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_without_the_option_has_no_usage_chunk(http: httpx.AsyncClient) -> None:
    chunks = await events(http, "/v1/chat/completions", GREEDY | {"messages": QUESTION})

    assert all(chunk["choices"] for chunk in chunks)
    assert not any("usage" in chunk for chunk in chunks)


async def test_a_prompt_asked_again_hits_all_whole_blocks_but_the_last_token(
    http: httpx.AsyncClient,
) -> None:
    prompt = list(range(1000, 1000 + 64))
    await http.post("/reset_prefix_cache")

    cold = await complete(http, prompt=prompt)
    warm = await complete(http, prompt=prompt)

    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # 64 tokens are 4 blocks; the last token must be computed, so only 3 can be taken.
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert warm["choices"] == cold["choices"]


async def test_a_salt_keeps_caches_apart(http: httpx.AsyncClient) -> None:
    prompt = list(range(2000, 2000 + 40))

    async def cached(**salt: str) -> int:
        answer = await complete(http, prompt=prompt, max_tokens=1, **salt)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(), await cached()] == [0, 32]
    assert [await cached(cache_salt="a"), await cached(cache_salt="a")] == [0, 32]
    assert await cached(cache_salt="b") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_eight_samples_of_one_prompt(client: AsyncOpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "n": 8, "seed": 3}
    texts = [""] * 8
    if stream:
        async for chunk in await client.chat.completions.create(
            messages=QUESTION, stream=True, **fields
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        answer = await client.chat.completions.create(messages=QUESTION, **fields)
        assert [choice.index for choice in answer.choices] == list(range(8))
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 8 * 6
        texts = [choice.message.content or "" for choice in answer.choices]

    assert len(set(texts)) > 1


async def test_a_seed_repeats_and_another_differs(http: httpx.AsyncClient) -> None:
    async def text(seed: int) -> str:
        fields = {"temperature": 1.0, "max_tokens": 5, "seed": seed}
        return str(
            (await complete(http, prompt="Once upon a time", **fields))["choices"][0]["text"]
        )

    first, again, *others = await asyncio.gather(*(text(seed) for seed in (1, 1, 2, 3, 4)))

    assert first == again
    assert set(others) != {first}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_the_text_and_is_not_shown(
    http: httpx.AsyncClient, stream: bool
) -> None:
    body = GREEDY | {"prompt": "one, two, three, four,", "max_tokens": 12}
    full = (await complete(http, **body))["choices"][0]["text"]
    # Two tokens' worth from the middle, so that the match spans tokens.
    stop = full[len(full) // 2 : len(full) // 2 + 4]

    if stream:
        choices = [
            chunk["choices"][0]
            for chunk in await events(http, "/v1/completions", body | {"stop": [stop]})
        ]
        text, choice = "".join(choice["text"] for choice in choices), choices[-1]
    else:
        choice = (await complete(http, **body | {"stop": stop}))["choices"][0]
        text = choice["text"]

    assert text == full[: full.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_end_of_sequence_stops_unless_ignored(
    http: httpx.AsyncClient, live_runner: LiveRunner
) -> None:
    # The end token is the natural continuation after a finished turn.
    body = GREEDY | {
        "messages": [
            {"role": "user", "content": "Say hi"},
            {"role": "assistant", "content": "Hi there! How can I help you today?"},
        ],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": 12,
        "return_token_ids": True,
    }
    stopped = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    ignored = (await http.post("/v1/chat/completions", json=body | {"ignore_eos": True})).json()[
        "choices"
    ][0]

    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"] is None
    assert stopped["token_ids"][-1] == 2
    assert "<|im_end|>" not in stopped["message"]["content"]
    assert ignored["finish_reason"] == "length"
    assert len(ignored["token_ids"]) == 12


async def test_token_ids_are_returned_on_request(
    http: httpx.AsyncClient, live_runner: LiveRunner, tokenizer: PromptTokenizer
) -> None:
    prompt = "The capital of France is"

    choice = (await complete(http, prompt=prompt, return_token_ids=True))["choices"][0]

    assert choice["prompt_token_ids"] == tokenizer.encode(prompt)
    assert decode(live_runner, choice["token_ids"]) == choice["text"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_streamed_token_ids_equal_those_of_the_whole_answer(
    http: httpx.AsyncClient, path: str
) -> None:
    body = GREEDY | {"return_token_ids": True, "messages": QUESTION, "prompt": "Hello there"}
    whole = (await http.post(path, json=body)).json()

    chunks = await events(http, path, body)

    streamed = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    prompts = [
        holder["prompt_token_ids"]
        for chunk in chunks
        for holder in (chunk, chunk["choices"][0])
        if "prompt_token_ids" in holder
    ]
    assert streamed == whole["choices"][0]["token_ids"]
    assert prompts == [whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]]


async def test_all_prompt_shapes_give_the_same_answers(
    http: httpx.AsyncClient, tokenizer: PromptTokenizer
) -> None:
    texts = ["Red, green and", "Two plus two is"]
    ids = [tokenizer.encode(text) for text in texts]
    single = [(await complete(http, prompt=text))["choices"][0]["text"] for text in texts]

    for prompts in (texts, ids):
        several = await complete(http, prompt=prompts)
        assert [choice["text"] for choice in several["choices"]] == single
        assert several["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert (await complete(http, prompt=ids[0]))["choices"][0]["text"] == single[0]


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(
    http: httpx.AsyncClient, tokenizer: PromptTokenizer
) -> None:
    texts = ["Red, green and", "Two plus two is"]

    answer = await complete(http, prompt=texts, n=2, return_token_ids=True)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [
        tokenizer.encode(texts[at // 2]) for at in range(4)
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_log_probabilities(client: AsyncOpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    if stream:
        entries: list[Any] = []
        text = ""
        async for chunk in await client.chat.completions.create(
            messages=QUESTION, stream=True, **fields
        ):
            choice = chunk.choices[0]
            text += choice.delta.content or ""
            entries += (choice.logprobs and choice.logprobs.content) or []
    else:
        answer = await client.chat.completions.create(messages=QUESTION, **fields)
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content or []
        text = answer.choices[0].message.content or ""

    assert len(entries) == 6
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == text
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        # Greedy takes the likeliest token.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, values[0])
        assert entry.logprob <= 0


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_log_probabilities(http: httpx.AsyncClient, stream: bool) -> None:
    body = GREEDY | {"prompt": "The sky is", "logprobs": 2}
    if stream:
        choices = [chunk["choices"][0] for chunk in await events(http, "/v1/completions", body)]
    else:
        choices = (await complete(http, **body))["choices"]

    def joined(key: str) -> list[Any]:
        return [value for choice in choices for value in choice["logprobs"][key]]

    text = "".join(choice["text"] for choice in choices)
    tokens, offsets = joined("tokens"), joined("text_offset")
    assert "".join(tokens) == text
    assert [text[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True)] == (
        [True] * 6
    )
    for token, value, top in zip(
        tokens, joined("token_logprobs"), joined("top_logprobs"), strict=True
    ):
        assert top[token] == value == max(top.values())
        assert len(top) == 2


async def test_without_the_option_there_are_no_log_probabilities(
    http: httpx.AsyncClient, client: AsyncOpenAI
) -> None:
    answer = await client.chat.completions.create(messages=QUESTION, **GREEDY)

    assert answer.choices[0].logprobs is None
    assert (await complete(http, prompt="x"))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_blocks(http: httpx.AsyncClient, stream: bool) -> None:
    async def active() -> int:
        return int((await http.get("/cache")).json()["tiers"]["gpu"]["blocks"]["active"])

    async def has_begun() -> bool:
        return await active() > 0

    async def is_free() -> bool:
        return await active() == 0

    body = GREEDY | {"messages": QUESTION, "max_tokens": 1000, "ignore_eos": True}
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=body | {"stream": stream}))
    await poll_until(has_begun, what="blocks in use")

    asking.cancel()

    await poll_until(is_free, what="blocks freed")


async def test_concurrent_requests_get_the_answers_they_get_alone(
    http: httpx.AsyncClient,
) -> None:
    prompts = [f"Item {number}: a short list of" for number in range(3)]
    alone = [(await complete(http, prompt=prompt))["choices"][0]["text"] for prompt in prompts]

    together = await asyncio.gather(*(complete(http, prompt=prompt) for prompt in prompts))

    assert [answer["choices"][0]["text"] for answer in together] == alone


async def test_models_and_an_unknown_model(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    listed = [model async for model in client.models.list()]

    assert [model.id for model in listed] == [MODEL]
    assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 2048
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    with pytest.raises(NotFoundError):
        await client.models.retrieve("gpt-4o")


async def test_a_request_beyond_the_context_names_both_numbers(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"2048.*2998") as caught:
        await client.completions.create(model=MODEL, prompt=[5] * 998, max_tokens=2000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError, match=r"2048.*2100"):
        await client.completions.create(model=MODEL, prompt=[5] * 2100, max_tokens=1)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{not json", 400),
        ("/v1/chat/completions", b"[]", 400),
        ("/v1/chat/completions", {"messages": QUESTION, "temperature": "hot"}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:,"}}]}]}, 400),
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": [49_152]}, 400),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404),
        ("/tokenize", {"prompt": 1}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/v1/embeddings", {}, 404),
        ("/v1/models", {}, 405),
        ("/v1/completions", b'{"prompt": "' + b"x" * (33 * 1024 * 1024) + b'"}', 413),
    ],
    ids=lambda value: None if not isinstance(value, str | int) else str(value),
)  # fmt: skip
async def test_every_refusal_is_an_openai_error_with_a_request_id(
    http: httpx.AsyncClient, path: str, body: Any, status: int
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    response = await http.post(path, content=content, headers={"x-request-id": "mine-1"})

    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.json()["error"]["message"]
    assert response.headers["x-request-id"] == "mine-1"


async def test_a_compressed_body_counts_by_its_real_size(http: httpx.AsyncClient) -> None:
    async def post(body: dict[str, Any]) -> int:
        content = gzip.compress(json.dumps(body).encode())
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        return (await http.post("/v1/completions", content=content, headers=headers)).status_code

    assert await post(GREEDY | {"prompt": "small"}) == 200
    assert await post(GREEDY | {"prompt": "x" * 40_000_000}) == 413


async def test_request_ids_are_made_when_missing_or_unusable(http: httpx.AsyncClient) -> None:
    made = [
        (await http.get("/health", headers=headers)).headers["x-request-id"]
        for headers in ({}, {}, {"x-request-id": "with blank"}, {"x-request-id": "x" * 500})
    ]

    assert len(set(made)) == 4
    assert all(len(request_id) == 32 for request_id in made)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": QUESTION},
        {"messages": [{"role": "system", "content": "Be brief."}, *QUESTION]},
        {"messages": QUESTION, "add_generation_prompt": False},
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "Name"}, {"type": "text", "text": "three."}]}]},
        {"messages": [*QUESTION, {"role": "assistant", "content": "Red, gr"}],
         "continue_final_message": True, "add_generation_prompt": False},
        {"messages": QUESTION, "tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)  # fmt: skip
async def test_tokenizing_a_chat_gives_the_prompt_the_engine_sees(
    http: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    told = (await http.post("/tokenize", json=body)).json()
    asked = {"return_token_ids": True, "max_tokens": 1}
    seen = (await http.post("/v1/chat/completions", json=body | asked)).json()

    assert told["tokens"] == seen["prompt_token_ids"]
    assert told["count"] == len(told["tokens"]) == seen["usage"]["prompt_tokens"]
    assert told["max_model_len"] == 2048


async def test_tokenizing_text(http: httpx.AsyncClient, tokenizer: PromptTokenizer) -> None:
    body = {"prompt": "  12 apples", "return_token_strs": True}

    told = (await http.post("/tokenize", json=body)).json()

    assert told["tokens"] == tokenizer.encode("  12 apples")
    assert "".join(told["token_strs"]) == "  12 apples"


async def test_the_tokenizer_handed_out_is_the_one_in_use(
    http: httpx.AsyncClient, tokenizer: PromptTokenizer
) -> None:
    handed = (await http.get("/tokenizer")).json()

    rebuilt = PromptTokenizer.from_parts(handed["tokenizer_json"], handed["tokenizer_config"])
    assert rebuilt.fingerprint == handed["fingerprint"] == tokenizer.fingerprint
    assert rebuilt.template_source == handed["chat_template"] == tokenizer.template_source


async def test_resetting_the_cache_empties_it(http: httpx.AsyncClient) -> None:
    async def blocks() -> dict[str, int]:
        found: dict[str, int] = (await http.get("/cache")).json()["tiers"]["gpu"]["blocks"]
        return found

    await complete(http, prompt=list(range(3000, 3050)))
    before = await blocks()

    reset = await http.post("/reset_prefix_cache")

    after = await blocks()
    assert reset.json() == {"success": True}
    assert before["cached"] >= 3
    assert after["cached"] == 0
    assert after["free"] == after["total"] == 2048 // 16
    assert before["free"] + before["cached"] + before["active"] == before["total"]


async def test_metrics_tell_what_was_served(http: httpx.AsyncClient) -> None:
    async def values() -> dict[str, float]:
        text = (await http.get("/metrics")).text
        return {
            sample.name + sample.labels.get("finished_reason", ""): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    before = await values()
    prompt = list(range(4000, 4040))
    await complete(http, prompt=prompt)
    await complete(http, prompt=prompt)
    after = await values()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("vllm:prompt_tokens_total") == 80
    assert grown("vllm:prefix_cache_hits_total") == grown("prefix_cache_hit_tokens") == 32
    assert grown("vllm:time_to_first_token_seconds_count") == 2
    assert grown("vllm:request_success_totallength") == 2
    assert after["ttft_p95"] > 0
    assert 0 < after["prefix_cache_hit_rate"] < 1

    async def is_settled() -> bool:
        # The engine publishes its figures after the step that gave the last token.
        found = await values()
        tokens = found["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
        return tokens == 12 and found["vllm:num_requests_running"] == 0

    await poll_until(is_settled, what="figures of the last step")


async def test_published_events_describe_what_was_computed(
    http: httpx.AsyncClient, live_runner: LiveRunner
) -> None:
    prompt = list(range(5000, 5040))
    await complete(http, prompt=prompt, max_tokens=1)
    publisher = live_runner.runner.publisher
    assert publisher is not None
    assert publisher.replay_endpoint is not None

    def stored() -> list[BlockStored]:
        return [
            event
            for batch in replay(publisher.replay_endpoint)
            for event in batch.events
            if isinstance(event, BlockStored) and set(event.token_ids) & set(prompt)
        ]

    await poll_until(lambda: bool(stored()), what="events of the prompt")
    found = stored()
    assert [token_id for event in found for token_id in event.token_ids] == prompt[:32]
    assert found[0].parent_block_hash is None
    assert {(event.block_size, event.medium) for event in found} == {(16, "GPU")}
    assert sum(len(event.block_hashes) for event in found) == 2


async def test_health_and_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/version")).json()["version"]


async def test_event_sources_are_those_that_are_bound(
    http: httpx.AsyncClient, live_runner: LiveRunner
) -> None:
    sources = (await http.get("/kv_event_sources")).json()

    publisher = live_runner.runner.publisher
    assert publisher is not None
    assert sources["0"]["endpoint"] == publisher.endpoint
    assert sources["0"]["replay_endpoint"] == publisher.replay_endpoint
    assert sources["0"]["topic"] == "kv@smollm2"
