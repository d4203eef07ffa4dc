"""Every other path: what is passed on, byte for byte, what is not, and who gets it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import yaml

from gateway.pass_through import check_pass_through
from gateway.protocols.multipart import model_of, parts_of
from gateway.protocols.surfaces import SURFACES, Surfaces
from gateway.routing.pool import Pool
from tests.fakes.engine import End, RawEngine, Script, Seen, answer, chunk, event, head, stream
from tests.fakes.gateway import gateway, worker
from tests.support import poll_until

DESCRIPTION = Path(__file__).parent.parent / "data" / "openapi.yaml"

RESPONSES = "/v1/responses"
FORM = "multipart/form-data; boundary=b7"
ADMINISTRATION = [
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/sleep"),
    *("/wake_up", "/v1/audio/../../sleep", "/v1/audio/sleep", "/flush_cache", "/collective_rpc"),
    *("/start_profile", "/update_weights_from_disk", "/v1/audio/%2e%2e/sleep", "/slots"),
]


@pytest.mark.parametrize("path", ADMINISTRATION)
async def test_administration_of_engines_is_no_path_of_the_gateways(path: str) -> None:
    async with RawEngine() as engine, gateway(engine.url) as gw:
        status, body, _ = await gw.post(path, data=b'{"model":"m"}')

    assert (status, json.loads(body)["error"]["type"]) == (404, "not_found_error")
    assert engine.seen == []


def test_no_configured_path_may_administer_engines_or_mean_two_things() -> None:
    for path in (*ADMINISTRATION, "v1/x", "/v1/a b", "/v1//x", "/admin/v1/workers", "/v1/*/x"):
        with pytest.raises(ValueError, match=r"expected a path|administers"):
            check_pass_through(path)

    assert check_pass_through("/v1/images/*") == "/v1/images/*"
    found = Surfaces(["/v1/images/*", "/v1/pooling", "/v1/completions"])
    assert found.find("/v1/images/edits") == found.find("/v1/pooling")
    assert found.find("/v1/images/sleep") is None
    assert found.find("/v1/completions") is SURFACES["/v1/completions"]


async def test_the_description_names_every_path_and_what_each_asks_for() -> None:
    """``bench/fuzz_schema.py`` holds the gateway to it, with a tool of its own environment."""
    paths = yaml.safe_load(DESCRIPTION.read_text())["paths"]
    posts = {path: item["post"] for path, item in paths.items() if "post" in item}
    assert posts.keys() == SURFACES.keys()
    required = {"Messages": "messages", "Prompt": "prompt", "Any": "model"}
    async with RawEngine(lambda _: answer(b"{}")) as engine, gateway(engine.url) as gw:
        for path, post in posts.items():
            name = required[post["requestBody"]["$ref"].rpartition("/")[2]]
            whole = {"model": "m", "messages": [], "prompt": ""}
            status, body, _ = await gw.post(path, {k: v for k, v in whole.items() if k != name})
            assert (status, f"'{name}'" in json.loads(body)["error"]["message"]) == (400, True)
        for path in paths.keys() - posts.keys():
            assert (await gw.get(path.replace("{model}", "m")))[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/audio/speech"],
)
async def test_bodies_pass_byte_for_byte_but_for_an_alias(path: str) -> None:
    body = b'{ "input":["caf\\u00e9"], "model" : "big","seed":9007199254740993,"x":1.0}'
    said = b'{"data":[],"usage":{"prompt_tokens":7,"total_tokens":7}}'
    async with (
        RawEngine(lambda _: answer(said)) as engine,
        gateway(engine.url, aliases={"big": "m"}) as gw,
    ):
        status, data, _ = await gw.post(path + "?x=%20y", data=body)
        record = await gw.record()

    assert (status, data) == (200, said)
    assert engine.seen[0].target == path + "?x=%20y"
    assert engine.seen[0].body == body.replace(b'"big"', b'"m"')
    assert (record.outcome, record.prompt_tokens, record.model) == ("ok", 7, "big")
    assert record.completion_tokens is None


def form(model: str = "m", boundary: str = "b7") -> bytes:
    """A form whose file holds what could be taken for a boundary or a field."""
    sound = b'\x00\xff--b8\r\n\r\nname="model"\r\n--b' + bytes(range(256)) * 64
    parts = [
        b'content-disposition: form-data; name="file"; filename="model"\r\n'
        b"content-type: audio/wav\r\n\r\n" + sound,
        b'Content-Disposition: form-data; name="model"\r\n\r\n' + model.encode(),
        b'content-disposition: form-data; name="language"\r\n\r\nen',
    ]
    mark = b"--" + boundary.encode()
    return b"".join(mark + b"\r\n" + part + b"\r\n" for part in parts) + mark + b"--\r\n"


@pytest.mark.parametrize(
    "kind", ['multipart/form-data; boundary="b7"', "Multipart/Form-Data;boundary=b7"]
)
async def test_a_form_goes_to_its_models_pool_byte_for_byte(kind: str) -> None:
    async with (
        RawEngine(lambda _: answer(b'{"text":"hi"}')) as engine,
        gateway(engine.url, aliases={"whisper": "m"}) as gw,
    ):
        for model in ("m", "whisper"):
            status, data, _ = await gw.post(
                "/v1/audio/transcriptions", data=form(model), headers={"content-type": kind}
            )
            assert (status, data) == (200, b'{"text":"hi"}')

    assert [seen.body for seen in engine.seen] == [form(), form()]
    assert engine.seen[0].headers["content-type"] == kind


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (form(), "multipart/form-data"),
        (form().replace(b'name="model"\r\n\r\n', b'name="other"\r\n\r\n'), FORM),
        (form(""), FORM),
        (form("m" * 1000), FORM),
        (form()[:-300], FORM),
        (form(), "multipart/form-data; boundary=b9"),
        (b"", FORM),
        (form().replace(b'name="language"', b'name="model"'), FORM),
        (b"--b7\r\n" + b'content-disposition: form-data; name="a"\r\n\r\nx\r\n--b7\r\n' * 400,
         FORM),
    ],
)  # fmt: skip
async def test_a_form_that_names_no_one_model_is_refused(body: bytes, kind: str) -> None:
    async with RawEngine() as engine, gateway(engine.url) as gw:
        status, data, _ = await gw.post(
            "/v1/audio/transcriptions", data=body, headers={"content-type": kind}
        )

    assert (status, json.loads(data)["error"]["type"]) == (400, "invalid_request_error")
    assert engine.seen == []


async def test_the_model_of_a_form_is_found_where_it_stands() -> None:
    body = form("whisper-1")
    field = model_of(body, await parts_of(body, FORM))

    assert body[field.start : field.end] == field.value.encode() == b"whisper-1"


async def test_the_official_client_transcribes_and_embeds() -> None:
    def respond(seen: Seen) -> Script:
        if seen.target == "/v1/embeddings":
            vector = {"object": "embedding", "index": 0, "embedding": [0.5]}
            document = {"object": "list", "data": [vector], "model": "m"}
            return answer(
                json.dumps({**document, "usage": {"prompt_tokens": 1, "total_tokens": 1}}).encode()
            )
        return answer(b'{"text":"hi"}')

    async with (
        RawEngine(respond) as engine,
        gateway(engine.url) as gw,
        openai.AsyncOpenAI(base_url=gw.url + "/v1", api_key="k") as client,
    ):
        heard = await client.audio.transcriptions.create(model="m", file=("a.wav", b"RIFF"))
        vectors = await client.embeddings.create(model="m", input="q", encoding_format="float")

    assert heard.text == "hi"
    assert vectors.data[0].embedding == [0.5]


async def test_sound_is_passed_on_as_it_comes_whatever_its_length() -> None:
    more = asyncio.Event()
    kind = "content-type: audio/mpeg"
    pieces: Script = [head(200, kind, "transfer-encoding: chunked"), chunk(b"a" * 100), more]
    async with (
        RawEngine(lambda _: [*pieces, chunk(b"b"), b"0\r\n\r\n"]) as engine,
        gateway(engine.url) as gw,
        gw.session.post(gw.url + "/v1/audio/speech", json={"model": "m", "input": "q"}) as response,
    ):
        begin = await response.content.readexactly(100)
        more.set()
        rest = await response.read()

    assert (begin, rest) == (b"a" * 100, b"b")
    assert response.headers["content-type"] == "audio/mpeg"


@pytest.mark.parametrize("end", [None, b"0\r\n\r\n"], ids=["cut off", "complete"])
async def test_a_stream_of_unknown_events_is_complete_if_its_connection_says_so(
    end: bytes | None,
) -> None:
    pieces = [event(type="transcript.text.delta", delta="a"), event(type="anything")]
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append([*stream(*pieces, end=None), end or End.FIN])
        _, body, _ = await gw.post("/v1/audio/transcriptions", {"model": "m", "stream": True})
        record = await gw.record()

    if end is None:
        assert record.outcome == "truncated"
        assert body.startswith(b"".join(pieces))
        assert b'"stream_cut_off"' in body
    else:
        assert (record.outcome, body) == ("ok", b"".join(pieces))


async def test_requests_without_a_prompt_go_where_there_is_least_to_do() -> None:
    release = asyncio.Event()

    def respond(seen: Seen) -> Script:
        return [release, *answer(b"{}")]

    async with RawEngine(respond) as a, RawEngine(respond) as b, gateway(a.url, b.url) as gw:
        waiting = [
            asyncio.create_task(gw.post("/v1/embeddings", {"model": "m", "input": "same"}))
            for _ in range(6)
        ]
        await poll_until(lambda: len(a.seen) + len(b.seen) == 6, what="all are sent")
        spread = len(a.seen), len(b.seen)
        release.set()
        await asyncio.gather(*waiting)

    assert spread == (3, 3)


async def test_no_retry_follows_once_a_worker_has_begun_to_answer() -> None:
    broken: Script = [head(200, "content-type: audio/mpeg", "content-length: 9"), b"abc", End.FIN]
    async with (
        RawEngine(lambda _: broken) as a,
        RawEngine(lambda _: broken) as b,
        gateway(a.url, b.url) as gw,
    ):
        with pytest.raises(aiohttp.ClientError):
            await gw.post("/v1/audio/speech", {"model": "m", "input": "q"})
        record = await gw.record()

    assert len(a.seen) + len(b.seen) == 1
    assert record.outcome == "truncated"


@pytest.mark.parametrize("upgrade", [True, False])
async def test_realtime_is_not_implemented_in_the_apis_shape(upgrade: bool) -> None:
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with RawEngine() as engine, gateway(engine.url) as gw:
        status, body, _ = await gw.get("/v1/realtime?model=m", headers=headers if upgrade else {})

    assert (status, json.loads(body)["error"]["code"]) == (501, "not_supported")
    assert engine.seen == []


async def test_one_model_is_told_by_its_name_slashes_included() -> None:
    async with RawEngine() as engine:
        pools = [
            Pool("p", models=["org/m"], aliases={"x": "org/m"}, workers=[worker("w", engine.url)])
        ]
        async with gateway(pools=pools) as gw:
            told = [json.loads((await gw.get(f"/v1/models/{name}"))[1]) for name in ("org/m", "x")]
            status, body, _ = await gw.get("/v1/models/nope")

    assert [model["id"] for model in told] == ["org/m", "x"]
    assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")


# Responses.


def response_engine(*, speaks: bool = True) -> RawEngine:
    made: list[int] = []

    def respond(seen: Seen) -> Script:
        if not speaks:
            return answer(b'{"detail":"Not Found"}', 404)
        body = seen.json()
        if not body:
            return answer(b'{"error":{"message":"input is missing"}}', 400)
        made.append(1)
        usage = {
            "input_tokens": 9,
            "output_tokens": 2,
            "input_tokens_details": {"cached_tokens": 4},
        }
        document = {"id": f"resp_{id(made)}_{len(made)}", "object": "response", "usage": usage}
        if not body.get("stream"):
            return answer(json.dumps(document).encode())
        return stream(*_response_events(document))

    return RawEngine(respond)


def _response_events(document: dict[str, Any]) -> list[bytes]:
    begun = {**document, "usage": None}
    told = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.completed", "response": document},
    ]
    return [f"event: {d['type']}\ndata: {json.dumps(d)}\n\n".encode() for d in told]


def computed(*engines: RawEngine) -> list[int]:
    return [sum(seen.body != b"{}" for seen in engine.seen) for engine in engines]


async def test_a_response_passes_byte_for_byte_and_is_accounted() -> None:
    body = b'{ "model":"m", "input":"caf\\u00e9","temperature":1.0,"store":false}'
    async with response_engine() as engine, gateway(engine.url) as gw:
        status, data, _ = await gw.post(RESPONSES, data=body)
        record = await gw.record()

    assert (status, json.loads(data)["object"]) == (200, "response")
    assert engine.seen[-1].body == body
    assert (record.prompt_tokens, record.completion_tokens) == (9, 2)
    assert record.observed_hit_tokens == 4


async def test_a_stream_of_a_response_passes_unchanged_and_ends_with_its_own_marker() -> None:
    async with response_engine() as engine, gateway(engine.url) as gw:
        _, body, _ = await gw.post(RESPONSES, {"model": "m", "input": "q", "stream": True})
        record = await gw.record()
        pieces = _response_events({"id": "r", "object": "response"})
        engine.scripts.append(stream(*pieces[:2]))
        _, cut, _ = await gw.post(RESPONSES, {"model": "m", "input": "q", "stream": True})
        cut_record = await gw.record()
    told = json.loads(cut.split(b"data: ")[-1])

    assert body.count(b"event: ") == 3
    assert (record.outcome, record.prompt_tokens) == ("ok", 9)
    assert record.ttft_s is not None
    assert cut_record.outcome == "truncated"
    assert (told["type"], told["code"]) == ("error", "stream_cut_off")


async def test_a_last_event_too_long_to_be_held_still_ends_its_stream() -> None:
    long = {"id": "r", "object": "response", "output": "x" * (300 << 10)}
    pieces = _response_events(long)[1:]
    async with response_engine() as engine, gateway(engine.url) as gw:
        await gw.post(RESPONSES, {"model": "m", "input": "q"})
        engine.scripts.append(stream(*pieces))
        _, body, _ = await gw.post(RESPONSES, {"model": "m", "input": "q", "stream": True})
        record = await gw.record()

    assert body == b"".join(pieces)
    assert record.outcome == "ok"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_conversation_stays_with_the_worker_that_keeps_it(is_streamed: bool) -> None:
    async with response_engine() as a, response_engine() as b, gateway(a.url, b.url) as gw:
        asked = {"model": "m", "input": "q", "stream": is_streamed}
        _, data, _ = await gw.post(RESPONSES, asked)
        made = data.split(b'"id": "')[1].split(b'"')[0].decode()
        home = computed(a, b).index(1)
        for _ in range(6):
            await gw.post(RESPONSES, {**asked, "previous_response_id": made})

    assert computed(a, b)[home] == 7


async def test_the_official_client_gets_responses_and_their_streams() -> None:
    async with (
        response_engine() as engine,
        gateway(engine.url) as gw,
        openai.AsyncOpenAI(base_url=gw.url + "/v1", api_key="k", max_retries=0) as client,
    ):
        whole = await client.responses.create(model="m", input="q")
        events = await client.responses.create(model="m", input="q", stream=True)
        kinds = [told.type async for told in events]
        engine.scripts.append(stream(*_response_events({"id": "r"})[:2]))
        broken = await client.responses.create(model="m", input="q", stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            _ = [told async for told in broken]

    assert whole.id.startswith("resp_")
    assert kinds[-1] == "response.completed"


async def test_engines_without_that_api_are_told_apart_clearly() -> None:
    async with response_engine(speaks=False) as engine, gateway(engine.url) as gw:
        status, body, response = await gw.post(RESPONSES, {"model": "m", "input": "q"})

    assert (status, json.loads(body)["error"]["code"]) == (501, "not_supported")
    assert "/v1/chat/completions" in json.loads(body)["error"]["message"]
    assert response.headers["x-should-retry"] == "false"


async def test_a_worker_is_asked_once_what_it_speaks() -> None:
    async with response_engine() as engine, gateway(engine.url) as gw:
        for _ in range(3):
            await gw.post(RESPONSES, {"model": "m", "input": "q"})

    assert sum(seen.body == b"{}" for seen in engine.seen) == 1
