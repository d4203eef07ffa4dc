"""Where workers publish: as configured, as they say, and never on somebody else's host."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.config import WorkerConfig
from gateway.fleet.sources import (
    Discovered,
    EventSource,
    SourceRefusedError,
    _own,
    configured,
    discover,
    spread,
)
from gateway.upstream.client import Upstream
from tests.gateway.feed_parts import Telling, telling
from tests.prefix_index.capture import FILES, FOLDER


def worker(**fields: Any) -> WorkerConfig:
    return WorkerConfig(id="w1", url="http://engine:8000", **fields)


async def tells(engine: str, path: str, answer: Any) -> Discovered | None:
    """Ask an engine on loopback that answers this."""
    async with telling(Telling({path: answer})) as url:
        upstream = Upstream(url)
        try:
            return await discover(upstream, engine)
        finally:
            upstream.close()


def test_one_address_is_one_publisher_without_a_rank() -> None:
    config = worker(kv_events="tcp://e:5557", kv_replay="tcp://e:5657", kv_topic="kv@w1")

    assert configured(config) == [EventSource("tcp://e:5557", "tcp://e:5657", "kv@w1", None)]
    assert configured(worker()) == []


def test_a_list_of_addresses_is_a_publisher_for_each_rank() -> None:
    config = worker(kv_events=["tcp://e:1", "tcp://e:2"], kv_replay=["tcp://e:3", "tcp://e:4"])

    assert configured(config) == [
        EventSource("tcp://e:1", "tcp://e:3", "", 0),
        EventSource("tcp://e:2", "tcp://e:4", "", 1),
    ]


def test_a_buffer_at_any_host_is_at_the_workers() -> None:
    (source,) = configured(worker(kv_events="tcp://*:5557", kv_replay="tcp://*:5657"))

    # The publisher connects to us, and listens for replays itself.
    assert (source.events, source.replay) == ("tcp://*:5557", "tcp://engine:5657")


def test_ranks_follow_each_other_by_port() -> None:
    source = EventSource("tcp://[::1]:5557", "tcp://e:5657", "t", None)

    assert spread(source, 1) == [source]
    assert spread(source, 3)[2] == EventSource("tcp://[::1]:5559", "tcp://e:5659", "t", 2)
    assert spread(EventSource("ipc:///kv", None, "", None), 3) == [
        EventSource("ipc:///kv", None, "", None)
    ]


def vllm(endpoint: str, replay: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay,
        "topic": "kv",
        **more,
    }


OWN_HOSTS = ["*", "0.0.0.0", "[::]", "127.0.0.1", "localhost", "[::1]"]  # noqa: S104


@pytest.mark.parametrize("named", OWN_HOSTS)
@pytest.mark.parametrize("engine", ["vllm", "runner"])
async def test_an_address_that_stands_for_the_worker_is_reached_at_its_host(
    engine: str, named: str
) -> None:
    answer = {"0": vllm(f"tcp://{named}:5557", f"tcp://{named}:5657")}
    found = await tells(engine, "/kv_event_sources", answer)

    assert found is not None
    assert found.sources == [
        EventSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", "kv", None)
    ]


async def test_each_rank_of_a_vllm_is_a_publisher() -> None:
    answer = {str(rank): vllm(f"tcp://*:{5557 + rank}") for rank in (1, 0)}
    found = await tells("vllm", "/kv_event_sources", answer)

    assert found is not None
    assert [(source.rank, source.events) for source in found.sources] == [
        (0, "tcp://127.0.0.1:5557"),
        (1, "tcp://127.0.0.1:5558"),
    ]


async def test_a_list_of_publishers_is_understood_as_well() -> None:
    answer = [{"data_parallel_rank": r, "endpoint": f"tcp://*:{7000 + r}"} for r in (0, 1)]
    found = await tells("vllm", "/kv_event_sources", answer)

    assert found is not None
    assert [source.rank for source in found.sources] == [0, 1]


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("vllm")])
async def test_what_a_real_vllm_answered_is_understood(name: str) -> None:
    header = json.loads((FOLDER / f"{name}.jsonl").read_text().splitlines()[0])
    found = await tells("vllm", "/kv_event_sources", header["kv_event_sources"])

    assert found is not None
    (source,) = found.sources
    assert source.events.startswith("ipc://")
    assert source.replay is not None
    assert source.topic.startswith("kv@")


def sglang(**block: Any) -> dict[str, Any]:
    return {
        "page_size": 16,
        "max_total_num_tokens": 65_536,
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": 5557,
            "topic": "kv",
            "block_size": 64,
            "dp_size": 1,
            **block,
        },
    }


async def test_a_sglang_tells_publishers_block_size_and_capacity() -> None:
    found = await tells("sglang", "/server_info", sglang(dp_size=2, replay_endpoint_port_base=5600))

    assert found == Discovered(
        [
            EventSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5600", "kv", 0),
            EventSource("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5601", "kv", 1),
        ],
        64,
        65_536,
    )


async def test_an_older_sglang_is_asked_at_its_older_path() -> None:
    found = await tells("sglang", "/get_server_info", {"page_size": 1, "kv_events": None})

    assert found == Discovered([], 1, None)


REFUSED = {
    "another host": "tcp://10.9.8.7:5557",
    "another name": "tcp://metadata.internal:80",
    "another IPv6 host": "tcp://[fd00::1]:5557",
    "no port": "tcp://127.0.0.1",
    "a port that is none": "tcp://127.0.0.1:99999",
    "another transport": "inproc://events",
    "a web address": "http://127.0.0.1:80",
    "nothing": "",
}


@pytest.mark.parametrize("endpoint", REFUSED.values(), ids=REFUSED)
async def test_a_worker_cannot_send_us_to_somebody_else(endpoint: str) -> None:
    for answer in (vllm(endpoint), vllm("tcp://*:5557", endpoint or "tcp://x:1")):
        with pytest.raises(SourceRefusedError):
            await tells("vllm", "/kv_event_sources", {"0": answer})


async def test_a_file_is_only_reached_on_the_workers_own_machine() -> None:
    found = await tells("runner", "/kv_event_sources", {"0": vllm("ipc:///run/kv")})
    assert found is not None
    assert found.sources[0].events == "ipc:///run/kv"

    with pytest.raises(SourceRefusedError):
        _own("ipc:///var/run/docker.sock", "10.0.0.5", {"10.0.0.5"})


ODD: dict[str, Any] = {
    "a number": 1,
    "text": "x",
    "null": None,
    "a list of numbers": {"0": [1]},
    "a rank that is no number": {"x": vllm("tcp://*:1")},
    "a negative rank": {"-1": vllm("tcp://*:1")},
    "a huge rank": {"9" * 30: vllm("tcp://*:1")},
    "an endpoint that is a number": {"0": {"endpoint": 5}},
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
async def test_an_answer_that_is_none_says_nothing(answer: Any) -> None:
    assert await tells("vllm", "/kv_event_sources", answer) is None


ODD_BLOCKS: dict[str, dict[str, Any]] = {
    "no port": {"endpoint_port_base": None},
    "a port that is text": {"endpoint_port_base": "5557"},
    "a port of 0": {"endpoint_port_base": 0},
    "ranks beyond the last port": {"endpoint_port_base": 65_535, "dp_size": 4},
    "no ranks": {"dp_size": 0},
    "more ranks than there are": {"dp_size": 10**9},
    "ranks that are a flag": {"dp_size": True},
    "a host that is a number": {"endpoint_host": 1},
    "a topic that is a list": {"topic": []},
}


@pytest.mark.parametrize("block", ODD_BLOCKS.values(), ids=ODD_BLOCKS)
async def test_a_sglang_block_that_is_none_says_nothing(block: dict[str, Any]) -> None:
    assert await tells("sglang", "/server_info", sglang(**block)) is None


async def test_an_engine_that_does_not_publish_says_so() -> None:
    assert await tells("vllm", "/kv_event_sources", {}) == Discovered([])
    assert await tells("vllm", "/elsewhere", {}) is None
    assert await tells("openai", "/kv_event_sources", {"0": vllm("tcp://*:1")}) is None
