"""Pages in Chromium, without a window: what it says of them, how wide they are, and pictures of them."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
)
LAPTOP, PHONE = (1280, 800), (390, 844)


@dataclass
class Look:
    """A page as it is shown."""

    messages: list[str]
    """Errors and warnings of its console, refused loads included."""
    overflow: float
    """Pixels by which it is wider than the window."""
    picture: bytes
    """A PNG of the window, or of the whole page."""


class Browser:
    """One page at a time, by the DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def look(self, page: Path, size: tuple[int, int] = LAPTOP, *, dark: bool = False, whole: bool = False) -> Look:
        """Opens a file and waits until it is loaded."""
        phone, scheme = size == PHONE, "dark" if dark else "light"
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": phone}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self._call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()
        overflow = float(self.value("document.documentElement.scrollWidth - document.documentElement.clientWidth"))
        picture = self._call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        said = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        messages = [json.dumps(event["params"]) for event in self._events if event["method"] in said]
        return Look(messages, overflow, base64.b64decode(picture))

    def value(self, expression: str) -> Any:
        """What an expression in JavaScript comes to on the page."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters, **session}))
        while (answer := self._receive()).get("id") != number:
            pass
        assert "error" not in answer, answer["error"]
        found: dict[str, Any] = answer["result"]
        return found

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._connection.recv(timeout=60))
        if "method" in message:
            self._events.append(message)
        return message


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Chromium with a new profile in ``folder``."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            port = folder / "DevToolsActivePort"
            deadline = time.monotonic() + 60
            while not (port.exists() and len(words := port.read_text().split()) == 2):
                assert process.poll() is None and time.monotonic() < deadline, "Chromium does not start"
                time.sleep(0.05)
            with connect(f"ws://127.0.0.1:{words[0]}{words[1]}", max_size=None) as connection:
                yield Browser(connection)
        finally:
            process.kill()
