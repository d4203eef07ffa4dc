"""``GET /admin/v1/documents`` and ``POST /admin/v1/purge``: what is kept is told, and forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.warm.merge import merge_documents, merge_purges
from tests.gateway.test_keep_warm import CHARS, KEEP, use
from tests.gateway.warm_parts import Caching, Warming, end, item, text_of, warming_over


async def used_by(gateway: Warming, tenant: str, name: str) -> None:
    for question in ("1?", "2?", "3?"):
        await gateway.ask(text_of(f"{tenant} {name}", CHARS), question, name,
                          **{"x-tenant-id": tenant})  # fmt: skip


async def test_hot_documents_are_listed_with_copies_and_value(tmp_path: Path) -> None:
    async with warming_over(tmp_path, Caching(), Caching(), **KEEP) as (gateway, _):
        await use(gateway, ["handbook"], times=4)
        await gateway.ask("short", "Only once?")
        found = await gateway.get("/admin/v1/documents")
        row = found["documents"][0]
        assert (row["id"], row["kind"], row["pool"]) == ("handbook", "document", "chat")
        assert row["prefix_tokens"] >= 1024
        assert row["hit_tokens"] >= 3 * 1024 - 10
        assert row["reuses"] == pytest.approx(3, abs=0.1)
        assert [copy["tiers"] for copy in row["copies"]] == [["gpu"]]
        assert row["stored"]
        assert found["total"]["stored"] == 1
        (tenant,) = found["tenants"]
        assert tenant["hit_tokens"] == row["hit_tokens"]
        assert tenant["stored_bytes"] == found["total"]["stored_bytes"] > 0


async def test_what_was_warmed_is_listed_with_what_it_brought(tmp_path: Path) -> None:
    async with warming_over(tmp_path, Caching(), **KEEP) as (gateway, _):
        events = await gateway.warm([item("a", pin=True)])
        tokens = events[0]["placements"][0]["tokens"]
        await gateway.ask(text_of("a"), "Why?", "a")
        (row,) = (await gateway.get("/admin/v1/documents"))["warmed"]
        assert (row["id"], row["warmed_on"]) == ("a", ["w0"])
        assert row["hit_tokens"] == row["computed_tokens"] == row["tokens"] == tokens


@pytest.mark.parametrize("limit", ["0", "x", "-1", "1.5", "99999999999", "٣"])
async def test_a_limit_that_is_none_is_an_error(tmp_path: Path, limit: str) -> None:
    async with (
        warming_over(tmp_path, Caching()) as (gateway, _),
        gateway.session.get(
            gateway.url + "/admin/v1/documents", params={"limit": limit}
        ) as response,
    ):
        assert response.status == 400
        assert "limit" in (await response.json())["error"]["message"]


async def test_a_purged_document_is_forgotten_and_holders_are_told(tmp_path: Path) -> None:
    async with warming_over(tmp_path, Caching(), **KEEP) as (gateway, _):
        await use(gateway, ["handbook", "other"])
        assert end(await gateway.warm([item("handbook", text_of("handbook", CHARS))]))["warm"] == 1
        status, told = await gateway.post("/admin/v1/purge", {"document": "handbook"})
        assert status == 200
        removed = told["removed"]
        assert removed["stored_prompts"] == 1
        assert removed["worth_rows"] == 1
        assert removed["warmed_prefixes"] == 1
        (held,) = told["still_held"]
        assert held["worker"] == "w0"
        assert held["tokens"] >= 1024
        rows = (await gateway.get("/admin/v1/documents"))["documents"]
        assert [row["id"] for row in rows] == ["other"]
        # Once more there is nothing to forget.
        _, told = await gateway.post("/admin/v1/purge", {"document": "handbook"})
        assert not any(told["removed"].values())


async def test_a_purged_tenant_leaves_nothing_and_others_stay(tmp_path: Path) -> None:
    engine = Caching()
    async with warming_over(tmp_path, engine, **KEEP) as (gateway, _):
        from gateway.proxy.server import API
        from gateway.tenancy import TrustedPeers

        gateway.gateway.app[API].tenancy.peers = TrustedPeers(["127.0.0.1"])
        for tenant in ("acme", "umbrella"):
            await used_by(gateway, tenant, "handbook")
        await gateway.gateway.misses.settled()
        status, told = await gateway.post("/admin/v1/purge", {"tenant": "acme"})
        assert status == 200
        assert told["removed"]["stored_prompts"] == 1
        assert told["removed"]["worth_rows"] == 2  # its document's and its own
        assert told["removed"]["miss_prompts"] >= 1
        rows = (await gateway.get("/admin/v1/documents"))["documents"]
        assert {row["tenant"] for row in rows} == {"umbrella"}
        assert {entry.tenant for entry in gateway.gateway.warmer.store} == {"umbrella"}
        # The document of one tenant only.
        _, told = await gateway.post("/admin/v1/purge", {"tenant": "acme", "document": "handbook"})
        assert not any(told["removed"].values())


@pytest.mark.parametrize(
    "body", [[], {}, {"tenant": ""}, {"document": ""}, {"tenant": 5}, {"all": True}, {"x": "a"}]
)
async def test_a_purge_of_nothing_in_particular_is_an_error(tmp_path: Path, body: Any) -> None:
    async with warming_over(tmp_path, Caching()) as (gateway, _):
        status, found = await gateway.post("/admin/v1/purge", body)
        assert status == 400
        assert "xpected" in found["error"]["message"]


def test_what_processes_count_adds_up_and_what_they_share_does_not() -> None:
    row = {
        "pool": "chat", "tenant": "", "document": "d", "requests": 1.0, "reuses": 1.0,
        "hit_tokens": 512, "lost_tokens": 0, "value_s": 0.5, "stored": False, "pinned": False,
        "copies": [{"worker": "w0", "tiers": ["gpu"]}],
    }  # fmt: skip
    warmed = {"pool": "chat", "tenant": "", "id": "a", "tokens": 512, "warmed_on": ["w0"],
              "copies": [], "computed_tokens": 512, "hit_tokens": 0}  # fmt: skip
    tenant = {"tenant": "", "documents": 1, "hit_tokens": 512, "value_s": 0.5, "stored": 1,
              "stored_bytes": 9}  # fmt: skip
    total = {"documents": 1, "warmed": 1, "stored": 1, "stored_bytes": 9}
    one = {"documents": [row], "warmed": [warmed], "tenants": [tenant], "total": total}
    two = one | {
        "documents": [row | {"stored": True}],
        "warmed": [warmed | {"warmed_on": ["w1"]}],
    }
    merged = merge_documents([one, two])
    (found,) = merged["documents"]
    assert (found["hit_tokens"], found["stored"], len(found["copies"])) == (1024, True, 1)
    assert merged["warmed"][0]["warmed_on"] == ["w0", "w1"]
    assert merged["tenants"][0]["stored_bytes"] == merged["total"]["stored_bytes"] == 18
    held = {"pool": "chat", "worker": "w0", "prefixes": 1, "tokens": 512}
    answers = [
        {"removed": {"worth_rows": 1}, "still_held": [held], "note": "n"},
        {"removed": {"worth_rows": 2}, "still_held": [held | {"tokens": 9}], "note": "n"},
    ]
    assert merge_purges(answers) == {
        "removed": {"worth_rows": 3},
        "still_held": [held],
        "note": "n",
    }
