"""A client bounds how far its own KV travels, and names no host, block or file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.proxy.headers import request_id_from
from gateway.proxy.transfers import without_transfers
from tests.fakes.engine import RawEngine, Seen
from tests.gateway.tenancy_parts import KEYS, T1, bearer, respond, sent, serving

# What connectors of vLLM 0.32, LMCache, SGLang and TensorRT-LLM read in a body.
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": True,
    "remote_host": "10.0.0.9",
    "remote_hosts": ["10.0.0.9"],
    "remote_port": 5600,
    "remote_bootstrap_addr": "http://10.0.0.9:1",
    "remote_engine_id": "e",
    "remote_block_ids": [[1, 2]],
    "remote_request_id": "r",
    "transfer_id": "t",
    "tp_size": 1,
    "hidden_states_path": "/etc/x",
    "prompt_token_ids": [1, 2],
    "source": {"url": "http://10.0.0.9", "tokens": 64},
    "lmcache.tag.user": "another tenant",
    "lmcache.skip_save": True,
    "a name of next year": 1,
    "": 1,
}
BESIDE: dict[str, Any] = {
    "ec_transfer_params": {"remote_host": "10.0.0.9"},
    "disaggregated_params": {"ctx_request_id": 1},
    "bootstrap_host": "10.0.0.9",
    "bootstrap_port": 1,
    "bootstrap_room": 7,
    "bootstrap_pair_key": "k",
    "disagg_prefill_dp_rank": 0,
}
SURFACES = {
    "chat/completions": '"messages": [ {"role":"user","content":"q"} ]',
    "completions": '"prompt": "q"',
    "messages": '"max_tokens": 5, "messages": [ {"role":"user","content":"q"} ]',
    "responses": '"input": "q"',
    "embeddings": '"input": "q"',
}
CAPS = {"max_offload_tokens": 64, "max_load_tokens": 0, "lmcache.max_offload_tokens": 1}
ODD = '"seed" : 18446744073709551617 , "x": [ 1.0 , "\\u00e9", {"do_remote_prefill": 1} ]'


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def raw(surface: str, *members: str) -> bytes:
    parts = ('{ "model": "m", ' + SURFACES[surface], *members, ODD + " }\n")
    return " , ".join(parts).encode()


async def forwarded(
    surface: str, body: bytes, headers: dict[str, str], **config: Any
) -> tuple[int, Seen | None]:
    """Return the gateway's status and what the engine got of a body."""
    async with RawEngine(respond) as engine, serving(engine, **config) as gw:
        headers = headers | {"content-type": "application/json"}
        url = f"{gw.url}/v1/{surface}"
        async with gw.session.post(url, data=body, headers=headers) as answer:
            await answer.read()
        # Engines are asked with an empty body what they speak.
        got = [seen for seen in sent(engine) if seen.body != b"{}"]
        return answer.status, got[-1] if got else None


WHO: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "a tenant": (bearer("key-t1"), {"tenants": [T1]}),
    "nobody": ({}, {}),
    "who is not trusted": (
        {"x-tenant-id": "t1"},
        {"server": {"access": {"trusted_peers": ["10.0.0.0/8"]}}},
    ),
}


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("who", WHO)
async def test_only_caps_pass_and_every_other_byte_stays(surface: str, who: str) -> None:
    headers, config = WHO[who]
    caps = ['"max_\\u006fffload_tokens" : 64', '"max_load_tokens":0']
    ours = [f"{json.dumps(name)} : {json.dumps(value)}" for name, value in PARAMS.items()]
    ours += ['"do_\\u0072emote_prefill": true', '"remote_host":"twice"']
    mixed = [*ours[:5], caps[0], *ours[5:], caps[1]]
    beside = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in BESIDE.items()]
    extra = '"vllm_xargs" : { "a": 1.0%s}'
    body = raw(
        surface,
        '"kv_transfer_params" : { ' + " , ".join(mixed) + "\n}",
        *beside[:3],
        extra % ', "kv_transfer_params": "x", "ec_transfer_params": 1 ',
        *beside[3:],
    )
    expected = raw(
        surface,
        '"kv_transfer_params" : { ' + " , ".join(caps) + "\n}",
        extra % " ",
    )

    status, seen = await forwarded(surface, body, headers, **config)

    assert status == 200
    assert seen is not None
    assert seen.body == expected


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("surface", SURFACES)
def test_each_alone_leaves_an_empty_object(surface: str, name: str) -> None:
    body = raw(surface, f'"kv_transfer_params":{json.dumps({name: PARAMS[name]})}')
    document = json.loads(body)

    kept, read = without_transfers(body, document)

    assert kept == raw(surface, '"kv_transfer_params":{}')
    assert read == json.loads(kept)
    assert document == json.loads(body)


@pytest.mark.parametrize("name", BESIDE)
def test_each_other_way_of_saying_it_is_removed(name: str) -> None:
    member = f"{json.dumps(name)}:{json.dumps(BESIDE[name])}"
    body = raw("chat/completions", member, member)

    kept, read = without_transfers(body, json.loads(body))

    assert kept == raw("chat/completions")
    assert read == json.loads(kept)


@pytest.mark.parametrize("given", [{}, None, [], "x", 5, CAPS, {"max_load_tokens": "x"}], ids=repr)
def test_what_names_nothing_goes_as_it_came(given: Any) -> None:
    body = raw("chat/completions", f'"kv_transfer_params": {json.dumps(given)}')
    document = json.loads(body)

    kept, read = without_transfers(body, document)

    assert kept is body
    assert read is document


@pytest.mark.parametrize("name", ["kv_transfer_params", "vllm_xargs"])
async def test_an_object_that_stands_twice_is_refused(name: str) -> None:
    body = raw("responses", f'"{name}":{{}}', f'"{name}":{{"remote_host":"h"}}')

    assert await forwarded("responses", body, {}) == (400, None)


@pytest.mark.parametrize("surface", SURFACES)
async def test_a_trusted_peer_says_what_it_likes(surface: str) -> None:
    members = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in BESIDE.items()]
    body = raw(surface, f'"kv_transfer_params" : {json.dumps(PARAMS)}', *members)
    server = {"access": {"trusted_peers": ["127.0.0.1"]}}

    status, seen = await forwarded(surface, body, {"x-tenant-id": "t1"}, server=server)

    assert status == 200
    assert seen is not None
    assert seen.body == body


async def test_a_translated_message_says_no_more_than_a_chat() -> None:
    body = raw("messages", f'"kv_transfer_params" : {json.dumps(PARAMS | CAPS)}')
    config = {"tenants": [T1 | {"isolate_cache": True}], "security": {"salt_secret_env": "SALT"}}

    status, seen = await forwarded("messages", body, bearer("key-t1"), **config)

    assert status == 200
    assert seen is not None
    assert seen.target == "/v1/chat/completions"
    assert seen.json()["kv_transfer_params"] == CAPS


async def test_the_same_bytes_mean_less_from_a_client_than_from_a_trusted_peer() -> None:
    """What is remembered of a body is not remembered for whoever sends it."""
    body = raw("chat/completions", f'"kv_transfer_params" : {json.dumps(PARAMS)}')
    server = {"access": {"trusted_peers": ["127.0.0.1"]}}
    async with RawEngine(respond) as engine, serving(engine, server=server, tenants=[T1]) as gw:
        for headers in [{"x-tenant-id": "t1"}, bearer("key-t1")] * 2:
            options = {"data": body, "headers": headers | {"content-type": "application/json"}}
            async with gw.session.post(gw.url + "/v1/chat/completions", **options) as answer:
                assert answer.status == 200
        told = [seen.json()["kv_transfer_params"] for seen in sent(engine)]

    assert told == [PARAMS, {}] * 2


@pytest.mark.parametrize(
    "given",
    [
        "___prefill_addr_host:10.0.0.9,handshake:1,notify:2___decode_addr_x",
        f"a___decode_addr_host:10.0.0.9_{'0' * 32}",
    ],
)
def test_a_request_id_names_no_host(given: str) -> None:
    assert "addr" not in request_id_from(given)
    assert request_id_from("a_prefill_addr_b") == "a_prefill_addr_b"
