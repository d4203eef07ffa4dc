"""Learned constants that outlive a gateway."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.fleet.sharing.constants import SharedConstants
from gateway.routing.learner import Learner, OutputLength
from gateway.routing.pool import Pool, Worker
from prefix_index.replica.link import Link
from tests.gateway.test_sharing_memories import running
from tests.support import poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]


def pool(*workers: str) -> Pool:
    return Pool("chat", models=["m"], workers=[Worker(name, "") for name in workers])


def taught(learner: Learner) -> Learner:
    for _ in range(8):
        learner.observe_prefill(0.5, uncached_tokens=1000, prompt_tokens=1000)
        learner.observe_decode(1.0, gaps=50, context_tokens=2000.0, in_flight=2.0)
    assert learner.model is not None
    return learner


async def test_a_new_gateway_prices_workers_as_the_last_one_did(valkey: Valkey) -> None:
    before, after = pool("w0", "w1"), pool("w0", "w1")
    links = [Link(valkey.url, namespace="t", timeout_s=1.0) for _ in range(2)]
    model = taught(before.workers["w0"].learner).model
    before.output_length.observe(5000)
    one = SharedConstants([before], links[0])
    async with running(links[0].run(), one.run()):
        await poll_until(lambda: links[0].is_up)
        one.save()
        await poll_until(lambda: one._map.num_waiting == 0)
    two = SharedConstants([after], links[1])
    async with running(links[1].run(), two.run()):
        await poll_until(lambda: after.workers["w0"].learner.model is not None)
        await poll_until(lambda: after.output_length.has_learned)
    assert after.workers["w0"].learner.model == model
    assert after.output_length.mean_tokens == before.output_length.mean_tokens
    assert after.workers["w1"].learner.model is None


async def test_what_was_measured_here_stays_and_a_worker_that_comes_later_gets_what_is_known(
    valkey: Valkey,
) -> None:
    before, after = pool("w0", "w1"), pool("w0")
    links = [Link(valkey.url, namespace="t", timeout_s=1.0) for _ in range(2)]
    for worker in before.workers.values():
        taught(worker.learner)
    own = after.workers["w0"].learner
    for _ in range(8):
        own.observe_prefill(0.1, uncached_tokens=1000, prompt_tokens=1000)
    one, two = SharedConstants([before], links[0]), SharedConstants([after], links[1])
    async with running(*(link.run() for link in links), one.run(), two.run()):
        one.save()
        await poll_until(lambda: len(two._heard_of) == 2)
        assert after.workers["w0"].learner is own
        after.add(Worker("w1", ""))
        two.save()
        assert after.workers["w1"].learner.model == before.workers["w1"].learner.model


RUBBISH: list[tuple[bytes, bytes]] = [
    (b"chat\0w0", b""),
    (b"chat\0w0", b"{}"),
    (b"chat\0w0", b"[1, 2"),
    (b"chat\0w0", b"\xff\x00"),
    (b"chat\0w0", b'{"prefill": "x"}'),
    (b"chat\0", b"-5"),
    (b"chat\0", b"1e400"),
    (b"chat\0", b"null"),
    (b"nobody\0w0", b"{}"),
    (b"\xff\xfe", b"{}"),
    (b"", b""),
]


@pytest.mark.parametrize(("key", "value"), RUBBISH)
def test_what_is_no_constant_changes_nothing(key: bytes, value: bytes) -> None:
    mine = pool("w0")
    shared: Any = SharedConstants([mine], Link("redis://127.0.0.1:1/0", namespace="t"))

    shared._heard(key, value)

    assert mine.workers["w0"].learner.model is None
    assert mine.output_length.mean_tokens == OutputLength().mean_tokens
