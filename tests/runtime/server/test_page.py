"""The web page, in headless Chromium: chat, completion, embeddings, load and keys; it loads nothing from other
servers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, NO_CHROMIUM, Browser, browsing
from icc.runtime.format.manifest import EmbeddingFacts

from .conftest import Served, StartServer, running, serve_command

pytestmark = pytest.mark.usefixtures("idle_after")
PAGE = Path(__file__).parents[3] / "runtime" / "server" / "http" / "page"
ALT = 1  # the modifier bit for `Browser.press`
KEY = "a-key-of-some-length"
IDLE = "!document.getElementById('send').hidden"


def test_its_files_are_served_and_name_nothing_outside(served: Served) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    for file in sorted(PAGE.iterdir()):
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        reply = served.ask("GET", path)
        assert reply.status == 200 and reply.headers["content-type"].startswith(kinds[file.suffix])
        text = reply.raw.decode().replace("http://www.w3.org/2000/svg", "")
        if file.name != "inline.js":  # it has a pattern for addresses in texts
            assert not re.search(r"https?://|//[a-z]+\.|@import", text), file.name
        assert not re.search(r"\beval\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text), file.name
        assert reply.headers["content-security-policy"].startswith("default-src 'self'")
        assert len(text.splitlines()) < 300, file.name
    assert served.ask("GET", "/page/../page_routes.py").status == 404
    about, figures = served.ask("GET", "/about").json, served.ask("GET", "/figures").json
    assert about["model"] == "toy" and about["chat"] and about["task"] == "generate" and about["max_len"] == 4096
    assert {"running", "waiting", "usage", "blocks", "prompt_tokens", "output_tokens", "ttft_s", "gap_count"} <= set(
        figures
    )


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def guarded(write_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that requires a key; the answers of its engine never end by themselves."""
    folder = tmp_path_factory.mktemp("guarded")
    template = {"tokenizer_config.json": json.dumps({"chat_template": "{{ messages[-1].content }}"})}
    limits = {"max_seq_len": 65536, "max_step_tokens": 256}
    engine = write_engine(folder / "endless.engine", eos_token_ids=[], tokenizer_files=template, **limits)
    (folder / "keys").write_text(KEY)
    command = serve_command(engine, "--api-key-file", str(folder / "keys"))
    with running(command, folder / "log", "endless", KEY) as server:
        yield server


def test_without_a_key_a_browser_gets_the_page_that_asks_for_it(guarded: Served) -> None:
    none = {"Authorization": ""}
    reply = guarded.ask("GET", "/", headers={**none, "Accept": "text/html,*/*"})
    assert reply.status == 401 and b"key-dialog" in reply.raw and reply.headers["www-authenticate"] == "Bearer"
    assert guarded.ask("GET", "/", headers=none).json["error"]["code"] == "invalid_api_key"
    assert guarded.ask("GET", "/page/main.js", headers=none).status == 200
    for path in ("/about", "/figures", "/page/nothing.js"):
        assert guarded.ask("GET", path, headers=none).status == 401


def test_a_key_is_asked_for_and_an_answer_can_be_stopped(guarded: Served, chromium: Browser) -> None:
    chromium.call("Page.navigate", url=guarded.url + "/")
    for key in ("not-the-key", KEY):
        chromium.wait_until("document.getElementById('key-dialog')?.open && !document.getElementById('key').value")
        chromium.fill("#key", key)
        chromium.click("#key-form button")
    chromium.wait_until("'ready' in document.body.dataset && !document.getElementById('key-dialog').open")
    assert chromium.text("#model") == "endless"
    chromium.fill("#ask", "a")
    chromium.click("#send")
    chromium.wait_until("document.querySelector('.turn.assistant .said')?.innerText.length > 10")
    chromium.value("document.getElementById('ask').focus()")
    chromium.press("Escape")
    stopped = f"{IDLE} && document.querySelector('.turn.assistant .stats').innerText.includes('stopped')"
    chromium.wait_until(stopped)
    guarded.wait_until(guarded.idle)
    said = "document.querySelector('.turn.assistant .said').textContent"
    before = chromium.value(said)
    chromium.click("[title='Go on with this answer']")
    chromium.wait_until(f"{said}.length > {len(before)}")
    chromium.press("Escape")
    chromium.wait_until(stopped)
    assert chromium.value("document.querySelectorAll('.turn').length") == 2
    guarded.wait_until(guarded.idle)


@pytest.fixture
def browser(chromium: Browser, served: Served) -> Iterator[Browser]:
    """The page of the shared server in a fresh state; it must end without an error."""
    chromium.look()
    chromium.open(served.url + "/")
    chromium.value("localStorage.clear()")
    chromium.call("Page.navigate", url="about:blank")
    chromium.events.clear()
    chromium.open(served.url + "/")
    yield chromium
    assert chromium.problems() == []
    assert all(url.startswith((served.url, "data:", "blob:", "about:")) for url in chromium.requested())


def ask(browser: Browser, text: str, most: int = 5) -> None:
    """Send a message and wait for the end of the answer. most: its maximum of tokens."""
    browser.fill("#field-max_tokens", str(most))
    browser.fill("#ask", text)
    browser.value("document.getElementById('ask').focus()")
    browser.press("Enter")
    browser.wait_until(IDLE)


def test_a_chat_is_answered_edited_answered_again_and_kept(browser: Browser, served: Served) -> None:
    assert browser.text("#model") == "toy" and "toy" in browser.text(".welcome")
    ask(browser, "first **question**")
    assert browser.text(".turn.user .said") == "first **question**"
    assert re.search(r"first after [\d.]+ m?s.*5 tokens", browser.text(".turn.assistant .stats").replace("\n", " "))

    browser.press("r", "KeyR", ALT)
    browser.wait_until(f"{IDLE} && document.querySelector('.turn.assistant .versions')")
    assert browser.text(".turn.assistant .versions").strip() == "2/2"
    browser.click("[title='Earlier version']")
    browser.wait_until("document.querySelector('.versions').innerText.includes('1/2')")

    browser.value("document.getElementById('ask').focus()")
    browser.press("ArrowUp")
    browser.fill(".edit", "edited")
    browser.click(".turn.user .primary")
    browser.wait_until(f"{IDLE} && document.querySelector('.turn.user .versions')")
    assert browser.text(".turn.user .said") == "edited"
    browser.fill("#system", "Be short.")
    ask(browser, "second")
    kept = browser.value("JSON.stringify(Object.entries(localStorage))")
    [chat] = [json.loads(value) for name, value in json.loads(kept) if name.startswith("icc.chat.")]
    assert chat["title"] == "first **question**" and chat["system"] == "Be short." and len(chat["turns"]) == 7

    browser.open(served.url + "/")
    assert browser.value("document.querySelectorAll('.turn').length") == 4
    browser.press("n", "KeyN", ALT)
    browser.wait_until("document.querySelectorAll('.turn').length === 0")
    browser.fill("#search", "question")
    browser.click("#chat-list .open")
    assert browser.value("document.querySelectorAll('.turn').length") == 4


def test_tokens_show_what_else_was_likely(browser: Browser) -> None:
    browser.click("#logprobs")
    ask(browser, "abc", 12)
    browser.click("[title='Probabilities of the tokens']")
    assert browser.value("document.querySelectorAll('.token').length") == 12
    browser.value("document.querySelector('.token').focus()")
    browser.press("ArrowRight")
    browser.wait_until("!document.getElementById('tip').hidden")
    assert browser.value("document.activeElement === document.querySelectorAll('.token')[1]")
    assert browser.value("document.querySelectorAll('#tip tr').length") >= 5 and "%" in browser.text("#tip")


def test_what_a_model_writes_stays_text(browser: Browser) -> None:
    """HTML in an answer is not rendered, and only safe links become links; an interrupted stream is reported."""
    text = (
        "**bold** <img src=x onerror='window.hit = 1'> <script>window.hit = 1</script>\n\n```html\n<b>x</b>\n```\n"
        "[bad](javascript:window.hit=1) [good](https://example.org/)\n\n| a |\n|---|\n| <i>c</i> |"
    )
    deltas = [{"reasoning_content": "I *think*"}, {"content": text[:30]}, {"content": text[30:]}]
    events = "".join(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas)
    for body, ends in ((events + "data: [DONE]\n\n", "''"), (events, "'broke off'")):
        canned = f"path.endsWith('chat/completions') ? Promise.resolve(new Response({json.dumps(body)}))"
        browser.value(f"window.real ??= window.fetch; window.fetch = (path, init) => {canned} : real(path, init); 1")
        browser.fill("#ask", "anything")
        browser.click("#send")
        answer = "[...document.querySelectorAll('.turn.assistant')].at(-1)"
        browser.wait_until(f"{IDLE} && {answer}.innerText.includes({ends})")
        found = browser.value(f"[...{answer}.querySelectorAll('a')].map(link => link.href)")
        assert found == ["https://example.org/"]
        assert browser.value(f"{answer}.querySelector('.code pre').innerText") == "<b>x</b>"
        assert browser.value(f"{answer}.querySelector('details').innerText.startsWith('Reasoning')")
        assert browser.value(f"{answer}.querySelectorAll('strong, td').length") == 2
    assert not browser.value("document.querySelector('#log img, #log script, #log b, #log i') || window.hit")


def test_tools_are_pasted_called_and_given_results(browser: Browser, served: Served) -> None:
    """The server's grammar forces the calls: they are required, and the only argument has one possible value."""
    browser.fill("#tools", '[{"name": "weather", "parameters": []}]')
    assert "JSON Schema" in browser.value("document.getElementById('tools-problem').textContent")
    ask(browser, "a")
    assert "The tools in the settings are wrong" in browser.text(".turn .problem")
    browser.press("n", "KeyN", ALT)
    city = {"type": "object", "properties": {"city": {"const": "Oslo"}}, "required": ["city"]}
    city["additionalProperties"] = False
    browser.fill("#tools", json.dumps({"name": "weather", "parameters": city}))
    assert browser.value("document.getElementById('tools-found').textContent") == "offered: weather"
    browser.fill("#tool-choice", "required")
    ask(browser, "a", 200)
    heads = browser.value("[...document.querySelectorAll('.call .code-bar')].map(head => head.innerText)")
    assert heads == ["calls weather", "calls weather", "calls weather, cut off"]
    assert json.loads(browser.text(".call pre")) == {"city": "Oslo"}
    assert browser.value("document.querySelectorAll('.results textarea').length") == 2
    browser.fill(".results textarea", "rain")
    browser.fill("#field-max_tokens", "5")
    browser.click(".results button")
    browser.wait_until(f"{IDLE} && document.querySelectorAll('.turn').length === 4")
    assert browser.text(".turn.tool pre") == "rain" and not browser.text(".turn .problem")
    assert browser.value("document.querySelector('.results') === null")
    browser.click(".turn.tool [title='Edit']")
    browser.fill(".results textarea", "sun")
    browser.click(".results button")
    browser.wait_until(f"{IDLE} && document.querySelector('.turn.tool .versions')")
    assert browser.text(".turn.tool pre") == "sun"


def test_a_wrong_field_is_told_of_and_the_servers_refusals_are_shown(browser: Browser) -> None:
    browser.fill("#field-top_p", "7")
    assert (
        browser.text(".field .wrong")
        or browser.value("document.querySelector('[aria-invalid=true]').id") == "field-top_p"
    )
    ask(browser, "a")  # the wrong field is not sent
    assert not browser.value("document.querySelector('.problem[role=alert]') !== null")
    ask(browser, "b" * 5000)
    assert "4096" in browser.text(".turn .problem")


def test_a_text_is_completed(browser: Browser) -> None:
    browser.click("#tab-complete")
    browser.wait_until("!document.getElementById('view-complete').hidden")
    browser.fill("#field-max_tokens", "9")
    browser.fill("#prompt", "ab")
    browser.press("Enter", modifiers=2)
    browser.wait_until("document.getElementById('completion').textContent === 'cdefghijk'")
    browser.wait_until("!document.getElementById('append').disabled")
    browser.click("#append")
    assert browser.value("document.getElementById('prompt').value") == "abcdefghijk"


def test_the_load_is_drawn_with_scales_on_a_desk_and_on_a_phone(browser: Browser, served: Served) -> None:
    served.complete("a", max_tokens=300)
    browser.click("#tab-load")
    browser.wait_until("document.querySelectorAll('.plot path.line').length >= 4")
    assert browser.value("document.querySelectorAll('figure.card').length") == 4
    scales = browser.value("[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('text').length)")
    assert min(scales) >= 6
    assert "Output tokens" in browser.text("#totals")
    for phone, dark in ((True, False), (True, True), (False, True)):
        browser.look(phone=phone, dark=dark)
        for tab in ("load", "complete", "chat"):
            browser.click(f"#tab-{tab}")
            wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            assert not browser.value(wide), (tab, phone)
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.click("#theme")  # light, whatever theme the system prefers
    assert browser.value("getComputedStyle(document.body).backgroundColor") != ground


@pytest.mark.soak
def test_an_engine_that_embeds_has_a_form_for_it(
    chromium: Browser, start: StartServer, write_engine: Callable[..., Path], tmp_path: Path
) -> None:
    facts = EmbeddingFacts("mean", True, 258)
    engine = write_engine(tmp_path / "vectors.engine", embedding=facts, max_seq_len=64, max_step_tokens=16)
    chromium.open(start(engine=engine).url + "/")
    assert chromium.value(
        "document.getElementById('tab-chat').hidden && document.getElementById('tab-complete').hidden"
    )
    chromium.value("document.querySelectorAll('#texts .icon-button')[2].click()")
    for number, text in enumerate(("abc", "cab")):
        chromium.value(f"document.querySelectorAll('#texts textarea')[{number}].value = '{text}'")
    chromium.click("#embed-run")
    chromium.wait_until("document.querySelector('.matrix') !== null")
    assert chromium.value("[...document.querySelectorAll('.alike')].map(cell => cell.innerText)") == ["1.000"] * 4
