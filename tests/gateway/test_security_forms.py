"""Forms say no more of where KV travels than bodies of JSON, however their parts are written."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bench.fuzz_forms import KIND, field, form
from gateway.errors import InvalidRequest
from gateway.protocols import multipart
from gateway.protocols.multipart import MAX_PARTS, SLICE_BYTES, parts_of
from gateway.proxy.headers import to_worker
from gateway.proxy.transfers import form_without_transfers
from tests.fakes.engine import RawEngine
from tests.gateway.tenancy_parts import KEYS, T1, asking, bearer, respond, sent, serving

MODEL, FILE = field("model", b"m"), field("file", b"\x00--b7 \xff\r\n--b8\r\n")
HOST = b'{"remote_host":"10.0.0.9"}'
TRANSFERS = ["ec_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_room"]
SPREAD = ["kv_transfer_params[remote_host]", "vllm_xargs.kv_transfer_params", "VLLM_XARGS"]


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


async def forwarded(body: bytes, headers: dict[str, str], **config: Any) -> bytes:
    """Return what an engine gets of a form."""
    url = "/v1/audio/transcriptions"
    async with RawEngine(respond) as engine, serving(engine, **config) as gw:
        headers = headers | {"content-type": KIND}
        status, _, _ = await gw.post(url, None, headers, data=body)
        assert status == 200
        (seen,) = sent(engine)
        assert seen.headers["content-type"] == KIND
        return seen.body


@pytest.mark.parametrize("name", [*TRANSFERS, *SPREAD])
@pytest.mark.parametrize("where", ["first", "between", "last"])
async def test_what_names_hosts_is_left_out_and_every_other_byte_stays(
    name: str, where: str
) -> None:
    told = field(name, HOST)
    parts = {"first": [told, MODEL, FILE], "between": [MODEL, told, told, FILE]}
    body = form(*parts.get(where, [MODEL, FILE, told]))

    assert await forwarded(body, {}) == form(MODEL, FILE)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("kv_transfer_params", b'{"max_load_tokens":0 , "source":{}}', b'{"max_load_tokens":0}'),
        ("kv_transfer_params", b'{"max_load_tokens":0}', b'{"max_load_tokens":0}'),
        ("kv_transfer_params", b"[1]", None),
        ("vllm_xargs", b'{"a": 1.0, "kv_transfer_params": "x"}', b'{"a": 1.0}'),
        ("vllm_xargs", b'{"a":"kv_transfer_params"}', b'{"a":"kv_transfer_params"}'),
        ("vllm_xargs", b'{"a":1}, "b":{"kv_transfer_params":1}', None),
        ("vllm_xargs", b"eyJrdl90cmFuc2Zlcl9wYXJhbXMiOjF9", None),
    ],
)  # fmt: skip
async def test_objects_keep_what_they_may_and_anything_else_is_left_out(
    name: str, value: bytes, kept: bytes | None
) -> None:
    left = [] if kept is None else [field(name, kept)]

    assert await forwarded(form(field(name, value), MODEL), {}) == form(*left, MODEL)


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
async def test_a_tenant_brings_no_salt_in_a_form(name: str) -> None:
    body = form(field(name, b"another tenant's"), MODEL)

    assert await forwarded(body, {}) == body
    assert await forwarded(body, bearer("key-t1"), tenants=[T1]) == form(MODEL)


async def test_a_trusted_peers_form_goes_as_it_came() -> None:
    body = form(MODEL, field("vllm_xargs", HOST), *(field(name, HOST) for name in TRANSFERS))
    server = {"access": {"trusted_peers": ["127.0.0.1"]}}

    assert await forwarded(body, {"x-tenant-id": "t1"}, server=server) == body


def head(*lines: bytes) -> bytes:
    return b"\r\n".join((*lines, b"", HOST))


D = b"content-disposition: form-data; "
# Each is a field of that name to some parser, and to another none, or part of a field before it.
AMBIGUOUS: dict[str, bytes] = {
    "extended": head(D + b"name*=utf-8''vllm_xargs"),
    "continued": head(D + b"name*0=vllm_; name*1=xargs"),
    "twice": head(D + b"name=a; name=vllm_xargs"),
    "two headers": head(D + b"name=a", D + b"name=vllm_xargs"),
    "in quotes": head(D + b'filename="a\\"; name="vllm_xargs"; name=a'),
    "escaped": head(D + b'name="vllm\\_xargs"'),
    "percent": head(D + b'name="vllm%5Fxargs"'),
    "encoded word": head(D + b'name="=?utf-8?q?vllm_xargs?="'),
    "folded": head(b"content-disposition: form-data;", b" name=vllm_xargs"),
    "bare LF": head(b"x: a\n" + D + b"name=vllm_xargs", D + b"name=a"),
    "a control": head(b"x: a\x0b" + D + b"name=vllm_xargs", D + b"name=a"),
    "half in quotes": head(D + b'name="vllm_xargs'),
    "space before the colon": head(b"content-disposition : form-data; name=vllm_xargs"),
    "no name": head(b"x: y"),
    "no headers": b"\r\n" + HOST,
    "LF before": field("a", b"x\n--b7\r\n" + field("vllm_xargs", HOST)),
    "CR before": field("a", b"x\r--b7\r\n" + field("vllm_xargs", HOST)),
    "a longer boundary": field("a", b"x\r\n--b7x\r\n" + field("vllm_xargs", HOST)),
    "padded": field("a", b"x\r\n--b7 \r\n" + field("vllm_xargs", HOST)),
    "behind the end": field("a", b"x\r\n--b7--\r\n--b7\r\n" + field("vllm_xargs", HOST)),
    "an end without value": field("a", b"--b7\r\n" + field("vllm_xargs", HOST)),
    "a long head": head(b"x: " + b"y" * 5000, D + b"name=vllm_xargs"),
    "a boundary too often": field("a", b"x--b7" * (MAX_PARTS + 1)),
}


@pytest.mark.parametrize("kind", AMBIGUOUS)
async def test_a_form_that_can_be_read_in_two_ways_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest):
        await parts_of(form(MODEL, AMBIGUOUS[kind]), KIND)


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data; boundary=b7; boundary=b8",
        "multipart/form-data; boundary =b8; boundary=b7",
        "multipart/form-data; boundary*=utf-8''b8; boundary=b7",
    ],
)
async def test_a_form_with_two_boundaries_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest):
        await parts_of(form(MODEL), kind)


@pytest.mark.parametrize(
    "part",
    [
        b'Content-Disposition: form-data; name="file"; filename="a \xc3\xa9;b=c.wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\nRIFF",
        b"content-disposition:form-data;name=timestamp_granularities[]\r\n\r\nword",
        b'content-disposition: form-data; filename="C:\\x.wav"; name="file"\r\n\r\n\r\n\r\n',
    ],
)
async def test_what_clients_write_is_read(part: bytes) -> None:
    body = form(part, MODEL)
    parts = await parts_of(body, KIND)

    assert parts[1].name == "model"
    assert form_without_transfers(body, parts) is body


@pytest.mark.parametrize("slice_bytes", range(1, 12))
async def test_where_a_search_is_cut_into_slices_changes_nothing(
    slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = form(field("file", b"--b\r\n--b8\r\n" + b"\x00" * 20), MODEL)
    whole = await parts_of(body, KIND)
    monkeypatch.setattr(multipart, "SLICE_BYTES", slice_bytes)

    assert await parts_of(body, KIND) == whole
    assert [part.name for part in whole] == ["file", "model"]


async def test_others_get_their_turn_while_a_large_form_is_read() -> None:
    body = form(field("file", bytes(8 * SLICE_BYTES)), MODEL)
    reading = asyncio.create_task(parts_of(body, KIND))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1

    assert turns >= 8
    assert len(await reading) == 2


@pytest.mark.parametrize(
    "kind", [KIND, "application/x-www-form-urlencoded", "Multipart/Mixed; boundary=b7"]
)
@pytest.mark.parametrize("path", ["chat/completions", "embeddings", "responses"])
async def test_a_body_that_was_read_as_json_is_passed_on_as_json(kind: str, path: str) -> None:
    body = json.dumps(asking(prompt="&vllm_xargs=x&", input="q")).encode()
    # There a form is a form.
    path = "completions" if (kind, path) == (KIND, "embeddings") else path
    async with RawEngine(respond) as engine, serving(engine) as gw:
        for _ in range(2):
            status, _, _ = await gw.post("/v1/" + path, None, {"content-type": kind}, data=body)
            assert status == 200
        got = [seen for seen in sent(engine) if seen.body == body]

    assert [seen.headers["content-type"] for seen in got] == ["application/json"] * 2


def test_of_several_content_types_the_one_that_was_believed_goes_on() -> None:
    pairs = [(b"Content-Type", b"application/json"), (b"x-a", b"1"), (b"content-type", b"x/y")]

    lines = to_worker(pairs, None, 1000).split(b"\r\n")
    assert lines[:2] == [b"Content-Type: application/json", b"x-a: 1"]
    assert not any(b"x/y" in line for line in lines)
