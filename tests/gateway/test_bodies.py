"""Bodies that came before are not read again, and only those."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from gateway.routing.bodies import KnownBodies
from gateway.routing.dispatch import Dispatcher, Inbound
from gateway.routing.pool import Pool, Worker
from prefix_index.chat import ChatTemplate
from prefix_index.index import Index
from prefix_index.prompts import PromptReader
from tests.gateway.routing_parts import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
DATED = "{{ strftime_now('%Y-%m-%d') }}" + TEMPLATE


def document(text: str = "What is a warm lane?") -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "stream": False}


def test_a_body_is_found_by_all_of_its_bytes_and_by_its_tenant() -> None:
    bodies = KnownBodies()
    raw = orjson.dumps(document())
    known = bodies.add("a", "chat", raw, document())

    assert bodies.find("a", "chat", bytes(raw)) is known
    assert bodies.find("b", "chat", raw) is None
    assert bodies.find("a", "completions", raw) is None
    for at in range(len(raw)):
        other = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        assert bodies.find("a", "chat", other) is None


def test_equal_hashes_of_different_bytes_are_not_taken_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.routing.bodies.xxh3_64_intdigest", lambda raw: 7)
    bodies = KnownBodies()
    bodies.add("a", "chat", b"one", {"n": 1})
    assert bodies.find("a", "chat", b"two") is None
    two = bodies.add("a", "chat", b"two", {"n": 2})
    assert bodies.find("a", "chat", b"two") is two
    assert (len(bodies), bodies.num_bytes) == (1, 3)


def test_the_memory_is_bounded_and_keeps_what_was_used_last() -> None:
    bodies = KnownBodies(max_bytes=1000, max_bodies=5)
    for n in range(4):
        bodies.add("", "chat", b"%d" % n * 200, {})
    bodies.find("", "chat", b"0" * 200)
    for n in range(4, 7):
        bodies.add("", "chat", b"%d" % n * 200, {})
    assert bodies.num_bytes <= 1000
    assert bodies.find("", "chat", b"0" * 200) is not None
    assert bodies.find("", "chat", b"1" * 200) is None
    for n in range(20):
        bodies.add("", "chat", b"%d" % n, {})
    assert len(bodies) == 5


@pytest.mark.parametrize("template", [TEMPLATE, DATED], ids=["timeless", "dated"])
async def test_a_known_body_has_the_prompt_that_reading_it_again_would_give(template: str) -> None:
    now_s = [0.0]
    tokenizer = byte_tokenizer()
    special = tokenizer.special_tokens
    chat = ChatTemplate(template, special_tokens=special, clock=lambda: now_s[0])
    reader = PromptReader(tokenizer, chat, model="m", block_size=4)
    worker = Worker("w0", "http://w0")
    pool = Pool("p", models=["m"], reader=reader, index=Index(4), workers=[worker])
    routes = Dispatcher([pool], seed=1)
    bodies = KnownBodies()
    raw = orjson.dumps(document())
    known = bodies.add("", "chat", raw, document())
    plans = []
    for day in range(2):
        now_s[0] = 86400.0 * day
        plans.append(await routes.plan(pool, Inbound("chat", known.document, {}, "m", known=known)))
        fresh = await routes.plan(pool, Inbound("chat", document(), {}, "m"))
        assert plans[-1].prompt is not None
        assert fresh.prompt is not None
        assert plans[-1].prompt.token_ids == fresh.prompt.token_ids
        assert plans[-1].hashes == fresh.hashes
    assert (plans[0].prompt is plans[1].prompt) == (template == TEMPLATE)


async def test_a_prompt_that_many_ask_for_at_once_is_tokenized_once() -> None:
    tokenizer = byte_tokenizer()
    chat = ChatTemplate(TEMPLATE, special_tokens=tokenizer.special_tokens)
    reader = PromptReader(tokenizer, chat, model="m", block_size=4)
    pool = Pool("p", models=["m"], reader=reader, index=Index(4), workers=[Worker("w0", "u")])
    routes = Dispatcher([pool], seed=1)
    learn, texts = reader.learn, list[str]()

    def counting(before: Any, new: Any, chain_keys: Any, text_keys: Any) -> Any:
        texts.extend(new)
        return learn(before, new, chain_keys, text_keys)

    reader.learn = counting  # type: ignore[method-assign]
    body = document("A sentence that nobody has sent yet. " * 400)
    waiting = [routes.plan(pool, Inbound("chat", body, {}, "m"), in_full=True) for _ in range(9)]
    plans = await asyncio.gather(*waiting)

    assert len(texts) == len(set(texts))
    assert all(plan.prompt is plans[0].prompt for plan in plans)
    assert routes._reading.backlog_chars == 0
    assert not routes._reading._behind
