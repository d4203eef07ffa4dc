"""The console's page in a real browser: what an operator sees and does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.chromium import Browser, Page, chromium
from tests.gateway.console_parts import TOKEN, consoled
from tests.tools import tool

# One browser for all: starting it takes longer than most tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = '<img src=x onerror="window.pwned=1">'
DECISIONS = "#decisions tbody tr"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium(tool("chromium")) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    async with browser.page() as found:
        yield found


def text(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).textContent"


def count(selector: str) -> str:
    return f"document.querySelectorAll({json.dumps(selector)}).length"


async def test_it_shows_a_live_gateway_and_each_decision(tmp_path: Path, page: Page) -> None:
    async with consoled(tmp_path) as running:
        await page.open(running.url + "/console")
        await page.until(count("#fleet tbody tr") + " === 2")
        assert await page.run(text("#decisions .none")) == "No request since this gateway started."
        for number in range(3):
            await running.ask(number, **{"x-request-id": f"asked-{number}"})
        await page.until(count(DECISIONS) + " === 3")
        await running.ask(3, **{"x-request-id": "asked-3"})
        await page.until(count(DECISIONS) + " === 4")
        row = await page.run(text(DECISIONS))
        assert "longest_prefix" in row
        assert "asked-3" in row
        # Said aloud, too.
        await page.until(text("#announce") + ".includes('longest prefix')")
        assert await page.run("document.querySelector('#announce').ariaLive") == "polite"
        data = await running.data()
        (holder,) = (w for w in data["workers"] if w["blocks"])
        shown = await page.run(text(f"#fleet tbody tr:nth-child({1 + int(holder['id'][1])})"))
        assert f"gpu {holder['blocks']['gpu']}" in shown
        await page.until(count("#documents tbody tr") + " === 1")
        assert "handbook" in await page.run(text("#documents tbody tr"))
        # A machine that is busy may be late, and that is pending then.
        assert "firing" not in await page.run(text("#status"))
        for worker in running.gateway.fleet.pools[0].workers.values():
            worker.parity = 0
        running.gateway.fleet.parities.clear()
        running.gateway.observing.console.alerts.look(0.0)
        await page.until(text("#status") + " === '2 alerts firing'")
        assert "docs/runbooks/WarmlaneParityDiverged.md" in await page.run(text("#alerts tbody"))
        assert {url.split("?")[0].removeprefix(running.url) for url in page.requests} <= {
            *("/console", "/console/data", "data:,")
        }
    assert page.errors == []


async def test_names_from_outside_stay_text(tmp_path: Path, page: Page) -> None:
    pool = {"name": HOSTILE, "models": ["m", HOSTILE], "workers": []}
    async with consoled(tmp_path, pool=None) as real:
        pool["workers"] = [{"id": "w0", "url": real.engines[0].url}]
        async with consoled(tmp_path, pool=pool) as running:
            for number in range(3):
                await running.ask(number, HOSTILE)
            console = running.gateway.observing.console
            running.gateway.observing.telemetry.settle()
            for row in [entry for _, entry in console.decisions._last]:
                row.request_id, row.reason, row.model = HOSTILE, HOSTILE, HOSTILE
                row.outcome = row.worker = row.source = HOSTILE
            running.gateway.fleet.pools[0].workers["w0"].health.ready = False
            console.alerts.look(0.0)
            await page.open(running.url + "/console")
            await page.until(count(DECISIONS) + " === 3")
            await page.until(count("#documents tbody tr") + " > 0")
            shown = await page.run("document.querySelector('main').textContent")
            assert shown.count(HOSTILE) > 8
            # Advice quotes names as well.
            assert await page.run(count("img, iframe, object, main script, main svg")) == 0
            assert await page.run("window.pwned") is None
    assert page.errors == []


async def test_it_is_used_without_a_mouse(tmp_path: Path, page: Page) -> None:
    async with consoled(tmp_path) as running:
        for number in range(3):
            await running.ask(number)
        await page.open(running.url + "/console")
        await page.until(count(DECISIONS) + " === 3")
        reached = []
        for _ in range(7):
            await page.press("Tab")
            style = await page.run(
                "(() => { const e = document.activeElement, s = getComputedStyle(e); return "
                "[(e.id || e.textContent).slice(0, 24), s.outlineStyle, s.outlineWidth]; })()"
            )
            reached.append(style[0])
            assert (style[1], style[2]) == ("solid", "2px"), f"{style[0]} shows no focus"
        assert reached[:3] == ["Skip to the fleet", "pause", "What is judged here, and"]
        assert reached[3:5] == ["w0", "w1"]
        assert reached[-1] == "What the reasons mean"
        # The first worker's decisions, and back.
        await page.run("document.querySelector('#fleet .pick').focus()")
        await page.press("Enter")
        await page.until("document.activeElement.ariaPressed === 'true'")
        await page.until(text("#decisions-text") + ".startsWith('of w0')")
        await page.press(" ")
        await page.until("document.activeElement.ariaPressed === 'false'")
        # What is polled meanwhile takes the focus from nobody.
        asked = len(page.requests)
        await page.until("true")
        while len(page.requests) < asked + 2:
            await page.until("true")
        assert await page.run("document.activeElement.textContent") == "w0"
        await page.run("document.querySelector('#pause').focus()")
        await page.press("Enter")
        await page.until(text("#age") + ".startsWith('paused')")
        await running.ask(9)
        await page.press("Enter")
        await page.until(count(DECISIONS) + " === 4")
    assert page.errors == []


@pytest.mark.parametrize("num_engines", [2, 20])
async def test_nothing_is_wider_than_the_window(
    num_engines: int, tmp_path: Path, page: Page
) -> None:
    async with consoled(tmp_path, num_engines=num_engines) as running:
        long_name = "a-document-with-a-name-that-goes-on-and-on-" * 3
        for number in range(4):
            await running.ask(number, long_name, **{"x-request-id": "r" * 96})
        running.gateway.fleet.pools[0].workers["w0"].health.ready = False
        running.gateway.observing.console.alerts.look(0.0)
        await page.open(running.url + "/console", width=360, height=740)
        await page.until(count(DECISIONS) + " === 4")
        await page.until(count("#documents tbody tr") + " > 0")
        await page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        for width in (360, 414, 768, 1024, 1180, 1440):
            await page.resize(width)
            await page.until(f"innerWidth === {width}")
            over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert await page.run(over) == 0, f"at {width} px"
        # On a phone a finger must hit what can be pressed.
        await page.resize(360)
        small = "[...document.querySelectorAll('button')].filter(b => b.offsetWidth)"
        small += ".filter(b => Math.min(b.offsetWidth, b.offsetHeight) < 24).length"
        assert await page.run(small) == 0
    assert page.errors == []


async def test_text_is_readable_in_both_schemes(tmp_path: Path, page: Page) -> None:
    pairs = ["ink panel", "ink ground", "soft panel", "soft ground", "soft head", "ink fresh"]
    pairs += [
        "bad panel",
        "bad bad-ground",
        "ink bad-ground",
        "warn panel",
        "good panel",
        "ink fill",
    ]
    contrasts = (
        "(() => { const of = name => { const e = document.createElement('p');"
        "e.style.color = `var(--${name})`; document.body.append(e);"
        "const found = getComputedStyle(e).color.match(/[0-9.]+/g).slice(0, 3).map(c => c / 255)"
        ".map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4); e.remove();"
        "return 0.2126 * found[0] + 0.7152 * found[1] + 0.0722 * found[2]; };"
        f"return {json.dumps(pairs)}.map(pair => {{ const [a, b] = pair.split(' ').map(of);"
        "return [pair, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; }); })()"
    )
    async with consoled(tmp_path) as running:
        await page.open(running.url + "/console")
        for is_dark in (False, True):
            await page.dark(is_dark)
            for pair, contrast in await page.run(contrasts):
                # WCAG 2.2 AA for small text.
                assert contrast >= 4.5, (pair, is_dark)


async def test_it_asks_for_the_token_and_keeps_it_in_the_tab(
    tmp_path: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSOLE_TOKEN", TOKEN)
    server: dict[str, Any] = {"access": {"admin_token_env": "CONSOLE_TOKEN"}}
    async with consoled(tmp_path, server=server) as running:
        await page.open(running.url + "/console")
        await page.until("document.activeElement.id === 'token'")
        assert page.errors == []
        assert not [url for url in page.requests if url.endswith("/console/data")]
        assert await page.run("document.querySelector('#fleet').offsetHeight") == 0
        await page.type("wrong")
        await page.press("Enter")
        await page.until(text("#login-error") + " === 'That token was refused.'")
        # The browser itself says that a request was refused; nothing else is wrong.
        assert all("401" in error for error in page.errors)
        page.errors.clear()
        await page.run("document.querySelector('#token').value = ''")
        await page.type(TOKEN)
        await page.press("Enter")
        await page.until(count("#fleet tbody tr") + " === 2")
        assert await page.run("sessionStorage.length") == 1
        assert await page.run("localStorage.length") == 0
        assert await page.run("document.cookie") == ""
        assert TOKEN not in await page.run("document.documentElement.outerHTML")
        assert not [url for url in page.requests if TOKEN in url]
        await page.send("Page.reload")
        await page.until(count("#fleet tbody tr") + " === 2")
        await page.run("document.querySelector('#forget').click()")
        await page.until("document.activeElement.id === 'token'")
        assert await page.run("sessionStorage.length") == 0
        assert await page.run("document.querySelector('#fleet').offsetHeight") == 0
    assert page.errors == []


async def test_a_gateway_that_is_away_is_said_and_found_again(tmp_path: Path, page: Page) -> None:
    async with consoled(tmp_path) as running:
        await page.open(running.url + "/console")
        await page.until(count("#fleet tbody tr") + " === 2")
        port = await running.leave()
        await page.until("!document.querySelector('#away').hidden")
        told = await page.run(text("#away-text"))
        assert told.startswith("The gateway does not answer since ")
        assert "What is shown is old." in told
        assert "Next try in" in told
        assert await page.run(text("#status")) == "Gateway away"
        assert await page.run(count("#fleet tbody tr")) == 2
        # It asks less and less often.
        await page.until(text("#away-text") + ".includes('Next try in 4 s')")
        await running.come_back(port)
        await page.run("document.querySelector('#retry').click()")
        await page.until("document.querySelector('#away').hidden")
        assert await page.run(text("#status")) != "Gateway away"
    assert all("ERR_CONNECTION_REFUSED" in error for error in page.errors)


async def test_it_asks_for_nothing_while_nobody_looks(tmp_path: Path, page: Page) -> None:
    async with consoled(tmp_path) as running:
        await page.open(running.url + "/console")
        await page.until(count("#fleet tbody tr") + " === 2")
        hide = "Object.defineProperty(document, 'hidden', {get: () => window.away});"
        change = "document.dispatchEvent(new Event('visibilitychange'))"
        await page.run(f"window.away = true; {hide} {change}")
        asked = len(page.requests)
        # As long as two polls would take.
        await page.run("new Promise(done => setTimeout(done, 2500))")
        assert len(page.requests) <= asked + 1
        await page.run(f"window.away = false; {change}")
        asked = len(page.requests)
        await running.ask(1)
        await page.until(count(DECISIONS) + " === 1")
    assert page.errors == []
