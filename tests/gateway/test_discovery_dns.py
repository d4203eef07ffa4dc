"""Workers from DNS: answers that flap or fail move nobody."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.discovery import DnsDiscovery
from gateway.discovery.from_dns import Address, DnsSource, LookupFailed, addresses_of
from tests.fakes.dns_server import NO_SUCH_NAME, SERVER_FAILURE, DnsServer
from tests.gateway.discovery_parts import Told

if TYPE_CHECKING:
    from collections.abc import Callable

A, B, C = (Address(f"10.0.0.{n}", 8000) for n in (1, 2, 3))
IDS = {address: str(address) for address in (A, B, C)}


class Asked:
    """A source that is asked by hand; ``next`` is the resolver's next answer."""

    def __init__(self, is_well: Callable[[str], bool] = lambda _id: True, **more: Any) -> None:
        config = {"type": "dns", "name": "vllm", "port": 8000, **more}
        self.told = Told()
        self.now_s = 0.0
        self.next: list[Address] | Exception = []
        self._source = DnsSource(
            DnsDiscovery.model_validate(config),
            lookup=self._lookup,
            is_well=is_well,
            clock=lambda: self.now_s,
        )

    async def _lookup(self) -> list[Address]:
        if isinstance(self.next, Exception):
            raise self.next
        return self.next

    async def ask(self, answer: list[Address] | Exception) -> list[str]:
        self.next = answer
        await self._source.ask(self.told.listing)
        return self.told.ids


async def test_a_worker_leaves_only_after_several_answers_without_it() -> None:
    asked = Asked(absent_answers=3)
    await asked.ask([A, B])
    for _ in range(2):
        assert await asked.ask([A]) == [IDS[A], IDS[B]]
    assert await asked.ask([A, B]) == [IDS[A], IDS[B]]
    for _ in range(2):
        assert await asked.ask([A]) == [IDS[A], IDS[B]]
    assert await asked.ask([A]) == [IDS[A]]
    assert not asked.told.listing.is_failing


async def test_a_worker_that_does_not_answer_either_leaves_at_once() -> None:
    ill = set[str]()
    asked = Asked(is_well=lambda worker_id: worker_id not in ill)
    await asked.ask([A, B])
    ill.add(IDS[B])
    assert await asked.ask([A, B]) == [IDS[A], IDS[B]]
    assert await asked.ask([A]) == [IDS[A]]
    assert not asked.told.listing.is_failing


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sets(st.sampled_from([A, B, C])), max_size=30), st.integers(1, 4))
def test_who_is_in_one_of_the_last_answers_stays(
    answers: list[set[Address]], patience: int
) -> None:
    asked = Asked(absent_answers=patience)
    for i, answer in enumerate(answers):
        ids = asyncio.run(asked.ask(list(answer)))
        recent = set().union(*answers[max(0, i + 1 - patience) : i + 1])
        assert ids == sorted(IDS[address] for address in recent)


async def test_rotating_answers_change_nothing() -> None:
    asked = Asked()
    for answer in ([A, B], [B, A], [A, B]):
        await asked.ask(answer)
    assert asked.told.num_changes == 1


@pytest.mark.parametrize("error", [LookupFailed("no server"), TimeoutError()])
async def test_a_failing_resolver_keeps_the_last_answer_for_a_bounded_time(
    error: Exception,
) -> None:
    asked = Asked(keep_s=60, absent_answers=1)
    await asked.ask([A, B])
    for asked.now_s in (10, 59):
        assert await asked.ask(error) == [IDS[A], IDS[B]]
    asked.now_s = 61
    assert await asked.ask(error) == []
    assert asked.told.listing.num_failures == 3
    assert asked.told.listing.is_failing
    assert await asked.ask([A]) == [IDS[A]]
    assert not asked.told.listing.is_failing


async def test_a_resolver_that_never_answered_says_nothing_of_workers() -> None:
    asked = Asked(keep_s=1)
    asked.now_s = 100
    await asked.ask(LookupFailed("no server"))
    assert asked.told.listing.found is None


async def test_ipv6_addresses_get_brackets_and_templates_are_filled() -> None:
    asked = Asked(kv_events="tcp://{ip}:5557", kv_replay="tcp://{ip}:5657", scheme="https")
    await asked.ask([Address("2001:db8::7", 8000), A])
    four, six = (found.worker for found in asked.told.listing.found or ())
    assert (four.id, four.url) == ("10.0.0.1:8000", "https://10.0.0.1:8000")
    assert four.kv_events == "tcp://10.0.0.1:5557"
    assert (six.id, six.url) == ("2001:db8::7:8000", "https://[2001:db8::7]:8000")
    assert six.kv_replay == "tcp://[2001:db8::7]:5657"


async def test_the_systems_resolver_is_asked_for_both_families() -> None:
    found = await addresses_of("localhost", 8000)
    assert Address("127.0.0.1", 8000) in found
    assert len(set(found)) == len(found)


async def test_a_name_that_does_not_exist_is_an_answer_and_a_dead_resolver_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Loop:
        async def getaddrinfo(self, *_args: Any, **_more: Any) -> Any:
            raise socket.gaierror(self.number, "said so")

        number = socket.EAI_NONAME

    loop = Loop()
    monkeypatch.setattr("gateway.discovery.from_dns.asyncio.get_running_loop", lambda: loop)
    assert await addresses_of("vllm", 8000) == []
    loop.number = socket.EAI_AGAIN
    with pytest.raises(LookupFailed, match="said so"):
        await addresses_of("vllm", 8000)


async def test_srv_records_name_host_and_port() -> None:
    pytest.importorskip("aiodns")
    from gateway.discovery.srv import SrvResolver

    async with DnsServer() as server:
        server.records = [
            (1, 5, 8001, "vllm-1.llm.svc"),
            (1, 9, 8000, "vllm-0.llm.svc"),
            (2, 1, 9000, "spare.llm.svc"),
        ]
        resolver = SrvResolver("_http._tcp.vllm", servers=["127.0.0.1"], port=server.port)
        assert await resolver.lookup() == [
            Address("vllm-0.llm.svc", 8000),
            Address("vllm-1.llm.svc", 8001),
        ]
        server.records = [(0, 0, 0, ".")]
        assert await resolver.lookup() == []
        server.code = NO_SUCH_NAME
        assert await resolver.lookup() == []
        server.code = SERVER_FAILURE
        with pytest.raises(LookupFailed):
            await resolver.lookup()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "expected port, or srv: true"),
        ({"port": 1, "srv": True}, "expected port, or srv: true"),
        ({"port": 0}, "greater than or equal to 1"),
        ({"port": 1, "kv_events": "udp://{ip}:1"}, "expected tcp://HOST:PORT"),
        ({"port": 1, "interval_s": 0}, "greater than 0"),
        ({"port": 1, "resolver": "x"}, "Extra inputs"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DnsDiscovery.model_validate({"type": "dns", "name": "vllm", **more})
