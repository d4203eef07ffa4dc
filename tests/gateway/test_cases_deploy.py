"""Reported faults of metrics: label floods, buckets that end too early, names that change."""

from __future__ import annotations

import asyncio
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from gateway.fleet.scrape import KV_USAGE_NAMES, Scrape, parse, parse_in_pieces
from gateway.telemetry.factory import MAX_OTHER_VALUES, MAX_VALUES
from gateway.telemetry.labels import OTHER
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.requests import Telemetry
from tests.fakes.engine import RawEngine, answer
from tests.gateway.tenancy_parts import CHAT, asking, respond, serving
from tests.support import poll_until

FLOOD = 100_000
TRUSTED = {"access": {"trusted_peers": ["127.0.0.1"]}}


def num_series(text: bytes) -> int:
    return sum(not line.startswith(b"#") for line in text.splitlines())


# D07
async def test_a_flood_of_tenants_documents_models_and_sessions_makes_no_series() -> None:
    async with (
        RawEngine(respond) as engine,
        serving(engine, server=TRUSTED, tenants=[{"name": "acme"}]) as gw,
    ):
        turn = asyncio.Semaphore(32)

        async def ask(number: int) -> None:
            named = f"flood-{number}"
            headers = {"x-tenant-id": named, "x-document-id": named, "x-session-id": named}
            # Every tenth asks for a model that is not there.
            model = named if number % 10 == 0 else "m"
            async with turn:
                await gw.post(CHAT, asking(named, model=model, user=named), headers)

        async def metrics() -> bytes:
            async with gw.session.get(gw.url + "/metrics") as response:
                return await response.read()

        await asyncio.gather(*map(ask, range(100)))
        before = num_series(await metrics())
        await asyncio.gather(*map(ask, range(100, 300)))
        for number in range(FLOOD):
            named = f"flood-{number}"
            gw.gateway.observing.onlookers.observe(
                RequestRecord(
                    named, "chat", tenant=named, pool="chat", model=named, worker="w0",
                    outcome="ok", reason="least_load", prompt_tokens=9, observed_hit_tokens=0,
                )
            )  # fmt: skip
        text = await metrics()

    assert num_series(text) <= before + 50
    assert len(text) < 1_000_000
    assert b"flood-" not in text


# D07, for whatever a label is made of: nothing relies on names being few.
@pytest.mark.parametrize("field", ["pool", "worker", "reason", "outcome", "source", "route"])
def test_the_values_of_any_label_are_bounded(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAX_VALUES, "worker", 40)
    telemetry = Telemetry(clock=lambda: 5.0)
    given = {"pool": "p", "worker": "w", "reason": "r", "outcome": "ok", "ttft_s": 1.0}
    for number in range(400):
        telemetry.observe(RequestRecord("r", "chat", **(given | {field: f"flood-{number}"})))

    label = {"source": "source", "route": "route"}.get(field, field)
    families = list(text_string_to_metric_families(telemetry.render().decode()))
    values = {s.labels[label] for f in families for s in f.samples if label in s.labels}
    assert len(values) <= MAX_OTHER_VALUES + 1
    assert OTHER in values
    assert telemetry.overflows[label] > 0
    assert len(telemetry.workers) <= 41


# D11
def test_each_first_token_falls_into_a_bucket_of_its_own() -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    counts = []
    for ttft_s in (0.004, 0.03, 0.2, 1.3, 8, 47, 130, 400):
        telemetry.observe(
            RequestRecord("r", "chat", pool="p", worker="w", outcome="ok", ttft_s=ttft_s)
        )
        counts.append(buckets_of(telemetry, "warmlane_ttft_seconds"))

    last = [0.0] * len(counts[0])
    fell_into = []
    for count in counts:
        fell_into.append([now - then for now, then in zip(count, last, strict=True)].index(1))
        last = count
    assert len(set(fell_into)) == 8
    assert max(fell_into) < len(last) - 1, "none only in +Inf"


# D11
def test_the_gateways_own_time_has_buckets_below_a_millisecond() -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    telemetry.observe(
        RequestRecord("r", "chat", pool="p", worker="w", outcome="ok", route_s=0.0003)
    )

    [family] = [
        f for f in text_string_to_metric_families(telemetry.render().decode())
        if f.name == "warmlane_route_seconds"
    ]  # fmt: skip
    bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
    assert len([bound for bound in bounds if bound <= 0.001]) >= 4


def buckets_of(telemetry: Telemetry, name: str) -> list[float]:
    """Cumulative counts in the order of their bounds."""
    return [
        sample.value
        for family in text_string_to_metric_families(telemetry.render().decode())
        for sample in family.samples
        if sample.name == f"{name}_bucket"
    ]


# D21
@pytest.mark.parametrize("name", KV_USAGE_NAMES)
def test_kv_usage_is_read_under_every_engines_name(name: str) -> None:
    assert parse(f"{name} 0.9").kv_usage == 0.9


numbers = st.sampled_from(["0.9", "9e-1", "9.0E-01", "+0.9", ".9", "0.90000"])
blanks = st.sampled_from([" ", "  ", "\t"])
label_values = st.text(
    st.characters(codec="utf-8", exclude_characters='\\"\n', exclude_categories=["Cs", "Cc"]),
    max_size=8,
)
noise = st.sampled_from(
    [
        "# HELP vllm:kv_cache_usage_perc 0.1",
        "# TYPE vllm:kv_cache_usage_perc gauge",
        "vllm:kv_cache_usage_perc_other 0.3",
        "other:vllm:kv_cache_usage_perc 0.4",
        "vllm:kv_cache_usage_perc",
        "vllm:kv_cache_usage_perc NaN",
        'vllm:kv_cache_usage_perc{a="b" 0.5',
        "vllm:kv_cache_usage_perc x",
        "vllm:kv_cache_usage_perc 90",
        "vllm:kv_cache_usage_perc -1",
        "vllm:kv_cache_usage_perc +Inf",
        "# EOF",
        "",
    ]
)


@st.composite
def usage_lines(draw: st.DrawFn) -> str:
    """One line that says 0.9 in any way that both formats allow."""
    name = draw(st.sampled_from(KV_USAGE_NAMES))
    labels = ""
    if draw(st.booleans()):
        pairs = draw(st.dictionaries(st.sampled_from(["model_name", "engine"]), label_values))
        quoted = [f'{key}="{value}}}\\"{value}"' for key, value in pairs.items()]
        labels = "{" + ",".join(quoted) + "}"
    behind = draw(st.sampled_from(["", " 1520879607789", " 1520879607.789", ' # {t="a"} 0.5 1.0']))
    return f"{name}{labels}{draw(blanks)}{draw(numbers)}{behind}"


# D21
@given(st.lists(noise), usage_lines(), st.lists(noise), st.sampled_from(["\n", "\r\n"]))
def test_labels_exponents_suffixes_and_noise_do_not_hide_it(
    before: list[str], line: str, after: list[str], end: str
) -> None:
    text = end.join((*before, line, *after)) + end

    assert parse(text).kv_usage == pytest.approx(0.9)


# D21
@given(st.lists(noise))
def test_what_nobody_says_is_unknown_and_not_zero(lines: list[str]) -> None:
    assert parse("\n".join(lines)).kv_usage is None


# D21
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_no_figure_is_taken_that_is_no_number(value: float) -> None:
    names = ("vllm:num_requests_running", "kv_cache_eviction_count", "process_start_time_seconds")
    assert parse("\n".join(f"{name} {value}" for name in names)) == Scrape()


async def test_a_text_of_any_size_is_read_as_in_one_piece() -> None:
    lines = [f'other{{a="{"x" * 90}"}} {number}' for number in range(3000)]
    lines.insert(1500, "vllm:num_requests_running 3")
    text = "\n".join((*lines, "sglang:token_usage 0.25", "y" * 100_000))

    scrape = await parse_in_pieces(text.encode() + b"\xff")
    assert scrape == parse(text)
    assert (scrape.running, scrape.kv_usage) == (3, 0.25)


# D21
async def test_a_worker_that_tells_no_kv_usage_is_said_once_and_has_no_series() -> None:
    told = [answer(b"vllm:num_requests_running 0\n"), answer(b"vllm:gpu_cache_usage_perc 0.9\n")]
    engines = [
        RawEngine(lambda seen, mine=mine: mine if seen.target == "/metrics" else respond(seen))
        for mine in told
    ]
    with capture_logs() as logs:
        async with engines[0], engines[1], serving(*engines) as gw:
            watch = gw.gateway.fleet.watches["w0"]
            await poll_until(lambda: watch.scrape.running is not None)
            # As if its next scrapes came.
            for _ in range(3):
                await watch._scrape()
            text = gw.gateway.telemetry.render().decode()

    warnings = [log for log in logs if log["event"] == "worker_kv_usage_unknown"]
    assert [(log["worker"], log["looked_for"]) for log in warnings] == [("w0", KV_USAGE_NAMES)]
    lines = text.splitlines()
    assert 'warmlane_worker_kv_usage_ratio{pool="chat",worker="w1"} 0.9' in lines
    assert not [
        line
        for line in lines
        if line.startswith("warmlane_worker_kv_usage_ratio{") and '"w0"' in line
    ]
