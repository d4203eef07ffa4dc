"""Whatever sources say in whatever order, the fleet is what their last answers ask for."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.discovery.discovery import Discovery
from gateway.discovery.listing import Found, Listing
from gateway.fleet.fleet import Fleet
from tests.gateway.discovery_parts import pool, settings_of, worker

IDS = ("w0", "a", "b", "c")
PORTS = (1, 2, 3, 4)

found = st.builds(
    lambda worker_id, port, model, to, is_ready: Found(
        worker(worker_id, f"http://127.0.0.1:{port}"), to, model, is_ready
    ),
    st.sampled_from(IDS),
    st.sampled_from(PORTS),
    st.sampled_from(["m", "n", "strange"]),
    st.sampled_from(["", "", "chat", "other", "nowhere"]),
    st.booleans(),
)
answers = st.lists(
    st.tuples(st.sampled_from(["chat", "other"]), st.lists(found, max_size=5)), max_size=12
)


def expected(
    said: dict[str, list[Found]], before: dict[str, str]
) -> dict[str, tuple[str, str, bool]]:
    """Return id -> pool, URL and readiness, by the rules as they are documented."""
    serves = {"chat": "m", "other": "n"}
    wanted = {"w0": ("chat", "http://127.0.0.1:1", True)}
    for own in ("chat", "other"):
        for one in said.get(own, []):
            urls = {url for _, url, _ in wanted.values()}
            if one.worker.id in wanted or one.worker.url in urls:
                continue
            if not one.is_ready and before.get(one.worker.id) != one.worker.url:
                continue
            pools = [one.pool] if one.pool else [own, *serves]
            to = next((name for name in pools if serves.get(name) == one.model), None)
            if to is not None:
                wanted[one.worker.id] = (to, one.worker.url, one.is_ready)
    return wanted


@settings(max_examples=100, deadline=None)
@given(answers)
def test_the_fleet_is_what_the_last_answers_ask_for(said: list[tuple[str, list[Found]]]) -> None:
    asyncio.run(_play(said))


async def _play(said: list[tuple[str, list[Found]]]) -> None:
    configured = {"id": "w0", "url": "http://127.0.0.1:1"}
    config = settings_of(pool(workers=[configured]), pool("other", ["n"]))
    fleet = Fleet(config)
    discovery = Discovery(fleet, config)
    discovery.listings = {name: Listing(name, lambda: None) for name in ("chat", "other")}
    last: dict[str, list[Found]] = {}
    for name, answer in said:
        before = {i: m.config.url for i, m in fleet.members().items()}
        last[name] = answer
        discovery.listings[name].told(answer)
        discovery.reconcile()
        now = {
            i: (m.pool.name, m.config.url, not any(w.draining for w in m.engine.workers))
            for i, m in fleet.members().items()
        }
        assert now == expected(last, before)
        in_pools = {p.name: set(p.workers) for p in fleet.pools}
        assert in_pools == {
            name: {i for i, (to, _, _) in now.items() if to == name} for name in in_pools
        }
        # Asked again, there is nothing to do.
        discovery.reconcile()
        assert {i: m.config.url for i, m in fleet.members().items()} == {
            i: url for i, (_, url, _) in now.items()
        }
        # What was found and does not serve is somewhere visible.
        for one in (one for listing in last.values() for one in listing):
            assert discovery.state_of(one.worker.id) == "serving" or (
                one.worker.id in discovery.refused
                or one.worker.id in discovery.waiting
                or one.worker.id in now
            )
    await fleet.stop()
