"""The page about worth: what it shows is what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Settings
from gateway.doctor.diagnosis import diagnose
from gateway.doctor.table import table
from gateway.routing.dispatch import Outcome
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.requests import Telemetry
from gateway.unsupported import unsupported
from gateway.worth.account import WorthAccount
from gateway.worth.metrics import WorthCollector
from gateway.worth.offload import MEMBERS
from gateway.worth.rows import row_of
from gateway.worth.rule import MANAGEMENT_S, MIN_REQUESTS, Terms
from gateway.worth.worth import Worth
from tests.gateway.worth_parts import Shop, asks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "worth.md").read_text("utf-8")
(ROW,) = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
SUMS = ("prompt_tokens", "shared_tokens", "lost_tokens", "store_tokens")


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: rounded(value)
        if isinstance(value, dict)
        else float(f"{value:.4g}")
        if isinstance(value, float)
        else value
        for name, value in row.items()
    }


def test_the_row_on_the_page_follows_from_its_terms() -> None:
    fields = {name: ROW[name] for name in Terms.__dataclass_fields__}
    names = {name: ROW[name] for name in ("pool", "reusable_tokens")}
    row = names | row_of(Terms(**fields), **{name: ROW[name] for name in SUMS})

    assert rounded(row) == rounded(ROW)
    assert list(row) == list(ROW)


def test_doctor_prints_what_is_on_the_page() -> None:
    (printed,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    tenant = ROW | {"tenant": "acme", "reuse_count": 38.0, "saved_s": -19.532, "store_s": 0.8}
    worth = {"pools": [ROW], "tenants": [tenant], "documents": [], "advice": []}
    totals = dict.fromkeys(
        ("tokens_lost", "prompt_tokens", "requests", "not_compared", "window_s"), 0
    )
    diagnosis = diagnose([], [], {"causes": [], "totals": totals}, worth)

    assert printed.strip() in table(diagnosis)


def test_the_configuration_on_the_page_is_one() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    settings = Settings.model_validate(yaml.safe_load(text))

    assert not unsupported(settings)[0]
    worth = Worth(settings)
    assert worth._capped == {"chat"}
    assert worth._tenant_caps == {"batch": 2048}


async def test_the_metrics_on_the_page_are_all_there_are() -> None:
    shop = Shop()
    await shop.restore_some()
    for number in range(9):
        await shop.serve(asks("handbook", number))
    telemetry = Telemetry()
    telemetry.register(WorthCollector(shop.account))
    record = {"pool": "chat", "worker": "w0", "outcome": Outcome.OK.value}
    telemetry.observe(RequestRecord("r", "chat", offload_tokens=1, **record))
    shown = telemetry.render().decode()

    named = set(re.findall(r"`(warmlane_\w+)`", PAGE))
    exported = set(re.findall(r"^(warmlane_worth_\w+)\{", shown, re.MULTILINE))
    assert exported <= named
    elsewhere = {"warmlane_worker_cache_value_seconds", "warmlane_queued_prefill_seconds"}
    assert named <= exported | elsewhere | {"warmlane_offload_caps_total"}
    assert "warmlane_offload_caps_total{" in shown


@pytest.mark.parametrize("word", [f"{MIN_REQUESTS:.0f} requests", f"{MANAGEMENT_S * 1000:.0f} ms"])
def test_the_constants_on_the_page_are_the_codes(word: str) -> None:
    assert word in PAGE


def test_the_members_on_the_page_are_those_that_are_sent() -> None:
    for engine, names in MEMBERS.items():
        (row,) = re.findall(rf"^\| `{engine}` \|(.*)\|$", PAGE, re.MULTILINE)
        assert all(f"`{name}`" in row for name in names)


async def test_every_field_of_a_row_is_on_the_page() -> None:
    account: WorthAccount = (shop := Shop()).account
    await shop.serve(asks("handbook", 0))
    report = account.report()

    assert set(report["pools"][0]) == set(ROW)
