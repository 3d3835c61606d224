"""Headless Chromium, driven over the pipes of its debugging protocol; nothing but the browser itself is needed."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
NO_CHROMIUM = "there is no Chromium here (Debian: apt install chromium)"
_PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}


class Browser:
    """A tab, over the pipes of --remote-debugging-pipe: messages end with a zero byte. `events`: the events that it
    reported."""

    _session: str | None = None

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._held = to, back, b""
        self._ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Run a command of the protocol and return its result."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            part = os.read(self._back, 1 << 16)
            assert part, "the browser has gone"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, ready: str = "'ready' in document.body.dataset") -> None:
        """Go to a page and wait until it is ready."""
        self.call("Page.navigate", url=url)
        self.wait_until(f"location.href.startsWith({url!r}) && document.body && {ready}")

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, (expression, result)
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """The text of the first element that a selector finds."""
        return self.value(f"document.querySelector({selector!r})?.innerText ?? ''")

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({selector!r}).click()")

    def fill(self, selector: str, text: str) -> None:
        """Puts text into a field, as if it were typed."""
        field, value = f"document.querySelector({selector!r})", json.dumps(text)
        self.value(f"{field}.value = {value}; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def press(self, key: str, code: str = "", modifiers: int = 0) -> None:
        """Press a key in the element that has the focus. modifiers: 1 Alt, 2 Ctrl, 8 Shift."""
        keys = {"key": key, "code": code or key, "modifiers": modifiers}
        codes = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowRight": 39}
        keys["windowsVirtualKeyCode"] = codes.get(key, ord(key[0].upper()))
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 and not modifiers else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **keys, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **keys)

    def wait_until(self, expression: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, (expression, self.value("document.body.innerText"))
            time.sleep(0.05)

    def look(self, *, phone: bool = False, dark: bool = False, width: int = 1360, height: int = 860) -> None:
        """Set the size of the window in pixels, and the colours that the system prefers."""
        size = _PHONE if phone else {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """Save the window as a picture, PNG or WebP by the file's name; `whole`: also the page outside the window."""
        kind = file.suffix.removeprefix(".")
        quality = {"quality": 80} if kind == "webp" else {}
        answer = self.call("Page.captureScreenshot", format=kind, captureBeyondViewport=whole, **quality)
        file.write_bytes(base64.b64decode(answer["data"]))

    def problems(self) -> list[Any]:
        """The exceptions of the page, and the requests that its content security policy refused."""
        self.value("1")
        thrown = [e["params"] for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        logged = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        return thrown + [entry for entry in logged if entry["source"] in ("security", "javascript")]

    def requested(self) -> list[str]:
        """The addresses that the page has asked for."""
        self.value("1")
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, until the end of the block."""
    assert CHROMIUM is not None, NO_CHROMIUM
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    command += [f"--user-data-dir={profile}", "--disable-dev-shm-usage", "--disable-background-networking"]
    # Chromium takes its commands from descriptor 3 and answers on 4
    shell = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        pass_fds=[read_commands, write_answers],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(write_commands, read_answers)
    finally:
        process.kill()
        process.wait()
        for descriptor in (write_commands, read_answers):
            os.close(descriptor)
