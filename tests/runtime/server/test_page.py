"""The page: in headless Chromium, driven over its debugging protocol; and that it fetches nothing from elsewhere."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Served

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = pytest.mark.usefixtures("idle_after")


def test_its_files_are_served_and_name_nothing_outside(served: Served) -> None:
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        reply = served.ask("GET", path)
        assert reply.status == 200 and reply.headers["content-type"].startswith(kind)
        text = reply.raw.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.|@import|eval\(|innerHTML", text)
        assert reply.headers["content-security-policy"].startswith("default-src 'self'")
    assert served.ask("GET", "/page/../page.js").status == 404
    assert set(served.ask("GET", "/figures").json) >= {"running", "waiting", "usage", "prompt_tokens", "output_tokens"}


class Browser:
    """A tab, over the pipes of --remote-debugging-pipe: messages end with a zero byte."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._held = to, back, b""
        self._ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **params: Any) -> Any:
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

    def value(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_until(self, expression: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, (expression, self.value("document.body.innerText"))
            time.sleep(0.05)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here (Debian: apt install chromium)")
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    command += [f"--user-data-dir={tmp_path}/profile", "--disable-dev-shm-usage", "--disable-background-networking"]
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


def test_a_prompt_is_answered_and_the_figures_live(served: Served, browser: Browser) -> None:
    browser.call("Page.navigate", url=served.url + "/")
    browser.wait_until("document.getElementById('state')?.textContent === 'ready'")
    assert browser.value("document.getElementById('model').textContent") == "toy"
    fill = "document.getElementById('{0}').value = {1};"
    browser.value(fill.format("prompt", "'ab'") + fill.format("max-tokens", "200") + "1")
    browser.value("document.getElementById('send').click()")
    browser.wait_until("document.getElementById('timing').textContent.includes('tokens')")
    answer = browser.value("document.getElementById('answer').textContent")
    assert answer.startswith("cdefghijkl")
    assert re.match(r"first token \d+ ms, \d+ tokens", browser.value("document.getElementById('timing').textContent"))
    browser.wait_until("Number(document.getElementById('figure-output').textContent) >= 100")
    assert browser.value("document.querySelectorAll('#figures dd').length") == 8

    browser.value(fill.format("kind", "'chat/completions'") + fill.format("max-tokens", "5") + "1")
    browser.value("document.getElementById('timing').textContent = ''; document.getElementById('send').click()")
    browser.wait_until("document.getElementById('timing').textContent.includes('5 tokens')")

    browser.value(fill.format("kind", "'completions'") + fill.format("max-tokens", "0") + "1")
    browser.value("document.getElementById('ask').noValidate = true; document.getElementById('send').click()")
    browser.wait_until("document.getElementById('answer').className === 'failed'")

    browser.value("1")
    urls = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert urls and all(url.startswith((served.url, "data:")) for url in urls), urls
    thrown = [event for event in browser.events if event["method"] == "Runtime.exceptionThrown"]
    assert thrown == []


def test_an_answer_can_be_stopped(served: Served, browser: Browser) -> None:
    browser.call("Page.navigate", url=served.url + "/")
    browser.wait_until("document.getElementById('state')?.textContent === 'ready'")
    set_up = "document.getElementById('max-tokens').value = 4000; document.getElementById('prompt').value = '\\u00ff';"
    browser.value(set_up + "document.getElementById('temperature').value = 50; document.getElementById('send').click()")
    browser.wait_until("document.getElementById('answer').textContent.length > 10")
    browser.value("document.getElementById('stop').click()")
    browser.wait_until("!document.getElementById('send').disabled")
    served.wait_until(served.idle)
