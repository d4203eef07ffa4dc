"""Drives a headless Chromium over its DevTools protocol: pages, what they say and do.

Source: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support import poll_until

# Nothing but what was asked for: no first-run pages, no updates, no second process tree per site.
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio", "--no-proxy-server"),
)


class Page:
    """One page; made by ``Browser.page``.

    Attributes:
        errors: What the page's console and the browser complained of, in order.
        requests: URLs that it asked for, in order.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Give a command and return its result.

        Raises:
            RuntimeError: If the browser refuses it.
        """
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        message = await asyncio.wait_for(answer, 20)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    async def open(self, url: str, *, width: int = 1280, height: int = 900) -> None:
        """Load a page in a window of a size, in CSS pixels."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.resize(width, height)
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def resize(self, width: int, height: int = 900) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip

    async def dark(self, is_dark: bool) -> None:
        """Prefer dark or light colours."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[feature])

    async def run(self, script: str) -> Any:
        """Return the value of an expression, awaited if it is a promise."""
        result = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str, *, deadline_s: float = 30.0) -> None:
        """Poll an expression until it is true."""

        async def holds() -> bool:
            return bool(await self.run(script))

        await poll_until(holds, deadline_s=deadline_s, what=script)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key by its DOM name."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        params = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        params |= {"modifiers": 8 if shift else 0}
        text = {"Enter": "\r", " ": " "}.get(key)
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        await self.send("Input.dispatchKeyEvent", **down, **params)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **params)

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def shot(self, *, top: int = 0, size: tuple[int, int]) -> bytes:
        """Return a picture of the page, from ``top`` on, in CSS pixels; PNG."""
        clip = {"x": 0, "y": top, "width": size[0], "height": size[1], "scale": 1}
        result = await self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(result["data"])

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            else:
                self._heard(event["method"], event["params"])

    def _heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['source']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


class Browser:
    """A running browser; made by ``chromium``."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    @asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        """Open a tab, which keeps nothing of the tabs before it."""
        async with self._session.put(f"{self._url}/json/new?about:blank") as response:
            target = await response.json(content_type=None)
        url = target["webSocketDebuggerUrl"]
        async with self._session.ws_connect(url, max_msg_size=0) as socket:
            page = Page(socket)
            try:
                yield page
            finally:
                await page.close()
        async with self._session.get(f"{self._url}/json/close/{target['id']}"):
            pass


@asynccontextmanager
async def chromium(binary: Path) -> AsyncIterator[Browser]:
    """Start a browser with a fresh profile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            str(binary), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        told = Path(profile) / "DevToolsActivePort"
        try:
            await poll_until(
                lambda: told.exists() and len(told.read_text().split()) == 2,
                deadline_s=30,
                what="a browser",
            )
            port = told.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                yield Browser(session, f"http://127.0.0.1:{port}")
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
