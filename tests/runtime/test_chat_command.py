"""`icc chat`, and the prompt of `icc run`: sessions over fakes, then the commands on toy engines."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from icc.runtime.chat.commands import Next, run_command
from icc.runtime.chat.history import History
from icc.runtime.chat.markdown import finished
from icc.runtime.chat.session import Session
from icc.runtime.cli.commands import main
from icc.runtime.errors import IccError, RequestError, UsageError
from icc.runtime.format.manifest import SamplingDefaults
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor, successor
from icc.runtime.templates.source import TemplateSource
from icc.runtime.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"  # as at the beginning of an answer in the history
)
NEVER: Callable[[], bool] = lambda: False  # noqa: E731


def nowhere(text: str) -> None:
    pass


@pytest.fixture
def session(toy_manifest: Callable[..., Any], byte_tokenizer_file: Path) -> Session:
    """A conversation with a model that counts upwards, in a context of 120 tokens."""
    executor = FakeExecutor(vocab_size=258, num_blocks=200, max_step_tokens=64, rule=successor)
    tokenizer = Tokenizer(byte_tokenizer_file.read_bytes())
    llm = LLM(toy_manifest(max_seq_len=120), executor, tokenizer, template=TemplateSource(TEMPLATE, {}))
    return Session(llm, settings={"temperature": 0.0, "max_tokens": 5})


def test_a_conversation_goes_on_and_finds_its_beginning_in_the_cache(session: Session) -> None:
    shown: list[str] = []
    first = session.ask("hi", shown.append, NEVER)
    assert "".join(shown) == first.text == "^_`ab" and (first.reason, first.cached) == ("length", 0)
    second = session.ask("and", nowhere, NEVER)
    assert second.cached >= 20  # "[user]hi[assistant]^_`a", in blocks of 4
    assert [message["content"] for message in session.history.messages] == ["hi", "^_`ab", "and", "^_`ab"]


def test_where_the_model_says_nothing_it_is_sampled_as_elsewhere(session: Session) -> None:
    llm = session._llm
    said = Session(llm).defaults()
    assert [said[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.8, 40, 0.95, 0.05]
    llm.manifest = msgspec.structs.replace(llm.manifest, sampling=SamplingDefaults(top_k=3))
    assert (Session(llm).defaults()["top_k"], Session(llm).defaults()["temperature"]) == (3, 0.8)
    llm.manifest = msgspec.structs.replace(llm.manifest, sampling=SamplingDefaults(temperature=0.3))
    assert [Session(llm).defaults()[name] for name in ("temperature", "top_k")] == [0.3, 0]


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(session: Session) -> None:
    said: list[str] = []
    stopped = session.ask("hi", said.append, lambda: len(said) == 2)
    assert (stopped.text, stopped.reason) == ("^_", "abort")
    assert session.history.messages[-1] == {"role": "assistant", "content": "^_"}
    session.ask("on", nowhere, lambda: True)
    assert len(session.history.turns) == 2 and not session._llm.loop.has_work()


def test_the_oldest_turns_make_room(session: Session) -> None:
    session.history.system = "S"
    answers = [session.ask(f"message {i}", nowhere, NEVER) for i in range(8)]
    assert max(answer.prompt_tokens for answer in answers) <= 120 - 5
    assert sum(answer.forgotten for answer in answers) == 8 - len(session.history.turns)
    later = [answer for answer in answers if answer.forgotten]
    assert later and session.history.messages[0] == {"role": "system", "content": "S"}
    assert answers[answers.index(later[0]) + 1].forgotten == 0  # half of the context was freed before
    turns = len(session.history.turns)
    with pytest.raises(RequestError, match=r"this takes 1.. tokens, the context has 120"):
        session.ask("x" * 130, nowhere, NEVER)
    assert len(session.history.turns) <= turns and session.ask("a", nowhere, NEVER).text == "^_`ab"


def test_what_the_template_refuses_was_not_said(session: Session) -> None:
    session._llm.prompting.template = TemplateSource("{{ raise_exception('no') }}", {}).open()
    with pytest.raises(RequestError, match="refuses these messages: no"):
        session.ask("a", nowhere, NEVER)
    assert not session.history.turns


def test_commands(session: Session, tmp_path: Path) -> None:
    def said(line: str) -> str:
        following, text = run_command(session, line)
        assert following is Next.READ
        return text

    assert "/temperature" not in said("/help") and "/regenerate" in said("/help")
    with pytest.raises(UsageError, match="nothing to answer"):
        run_command(session, "/regenerate")
    session.ask("hi", nowhere, NEVER)
    assert said("/system Be brief.") == "system: Be brief." and said("/system") == "system: Be brief."
    file = tmp_path / "talk.json"
    assert said(f"/save {file}") == f"saved to {file}"
    assert [m["role"] for m in json.loads(file.read_text())["messages"]] == ["system", "user", "assistant"]
    assert said("/reset") and not session.history.turns and session.history.system
    assert said(f"/load {file}") == f"3 messages of {file}" and session.history.system == "Be brief."
    assert run_command(session, "/regenerate") == (Next.ANSWER, "")
    assert session.history.messages[-1] == {"role": "user", "content": "hi"}
    assert said("/set temperature 0.5") == "temperature = 0.5" and session.settings["temperature"] == 0.5
    assert said("/set stop END") == 'stop = "END"' and said("/set regex [0-9]+") == 'regex = "[0-9]+"'
    assert said("/set max_tokens default") == "max_tokens = default" and "max_tokens" not in session.settings
    assert "  top_k = 40\n" in said("/set") and "5 tokens in" in said("/stats")
    assert said("/system none") == "system: none" and said("/history") == "user: hi"
    assert run_command(session, "/quit") == (Next.LEAVE, "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nonsense", "is no command"),
        ("/reset now", "takes nothing"),
        ("/save", "which file"),
        ("/save /nowhere/at/all", "cannot be written"),
        ("/load /nowhere", "cannot be read"),
        ("/set temperature", "which temperature"),
        ("/set temperature -1", "temperature = -1"),
        ("/set n 3", "n is no setting"),
        ("/set top_k many", "must be an integer"),
    ],
)
def test_a_command_that_fails_changes_nothing(session: Session, line: str, words: str) -> None:
    before = dict(session.settings)
    with pytest.raises(IccError, match=words):
        run_command(session, line)
    assert session.settings == before


@pytest.mark.parametrize("text", ["{", "[]", '{"messages": 3}', '[{"content": "a"}]', "\udcff"])
def test_a_file_that_holds_no_conversation_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "f"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(IccError):
        History.load(file)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("one", "one"),
        ("one\n\n", "one\n\n"),
        ("one\n\ntwo", "two"),
        ("one\n\ntwo\n\nthree", "three"),
        ("one\n\n- two", "one\n\n- two"),
        ("one\n\n    two", "one\n\n    two"),
        ("```\na\n\nb", "```\na\n\nb"),
        ("```\na\n\nb\n```\n\nc", "c"),
        ("x\n\n~~~\na\n\nb", "~~~\na\n\nb"),
    ],
)
def test_which_markdown_is_finished(text: str, rest: str) -> None:
    assert text[finished(text) :] == rest


# -- commands ----------------------------------------------------------------------------------------------------------

Make = Callable[..., Path]
CONFIG = {"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE})}


@pytest.fixture
def talking(make_engine: Make) -> str:
    """A toy engine with a chat template."""
    return str(make_engine("talking.engine", tokenizer_files=CONFIG, max_seq_len=200))


def given(monkeypatch: pytest.MonkeyPatch, text: str | bytes) -> None:
    """Redirect standard input to this text."""
    raw = io.BytesIO(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))


def test_run_answers_through_the_template_where_there_is_one(
    talking: str, make_engine: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(engine: str, *options: str) -> str:
        assert main(["run", engine, "--max-tokens", "4", *options]) == 0
        return capsys.readouterr().out

    assert run(talking, "-p", "hi") == run(talking, "-p", "hi", "--chat") == "^_`a\n"
    assert run(talking, "-p", "hi", "--raw") == "jklm\n"
    assert run(talking, "--ids", "104,105") == "jklm\n"
    found = json.loads(run(talking, "-p", "hi", "--system", "S", "--json"))
    assert found["prompt_tokens"] == len("[system]S[user]hi[assistant]")
    assert main(["run", talking, "-p", "hi"]) == 0 and capsys.readouterr().err.endswith("ended by stop\n")
    bare = str(make_engine())
    assert run(bare, "-p", "hi") == "jklm\n"
    assert run(bare, "-p", "hi", "--regex", "[xy]{2}") in ("xx\n", "xy\n", "yx\n", "yy\n")


def test_a_template_may_be_given(
    make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, file = str(make_engine()), tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}!")
    options = ["--chat-template", str(file), "--max-tokens", "3", "--temperature", "0"]
    assert main(["run", bare, "-p", "hi", *options]) == 0 and capsys.readouterr().out == '"#$\n'
    given(monkeypatch, "hi\n")
    assert main(["chat", bare, *options]) == 0 and capsys.readouterr().out == '"#$\n'
    assert main(["run", bare, "-p", "hi", "--raw", *options]) == 2
    assert main(["chat", bare, "--chat-template", str(tmp_path)]) == 2
    file.write_text("{% for %}")
    for command in (["run", "-p", "hi", bare], ["chat", bare]):
        assert main([*command, *options]) == 24 and "the chat template cannot be used" in capsys.readouterr().err


def test_run_reads_standard_input(
    talking: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["-p", "-"], []):
        given(monkeypatch, "hi\n")
        assert main(["run", talking, *options, "--raw", "--max-tokens", "2"]) == 0
        assert capsys.readouterr().out == "jk\n"
    given(monkeypatch, b"\xff")
    assert main(["run", talking, "-p", "-"]) == 2
    assert "standard input is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "{bare}", "-p", "a", "--chat"], 24, "the engine has no chat template"),
        (["run", "{bare}", "-p", "a", "--system", "s"], 2, "--system: the engine has no chat template"),
        (["run", "{talking}", "--ids", "1", "--chat"], 2, "--chat: token ids are taken as they are"),
        (["run", "{talking}", "-p", "a", "--raw", "--system", "s"], 2, "--system: only a conversation"),
        (["run", "{talking}", "-p", "a", "--json-schema", "@nothing"], 2, "nothing cannot be read"),
        (["run", "{talking}", "-p", "a", "--json-schema", "3"], 2, "must be a JSON object"),
        (["run", "{talking}", "-p", "a", "--regex", "(("], 24, "the grammar was refused"),
        (["chat", "{bare}"], 24, "the engine has no chat template"),
        (["chat", "{talking}", "--temperature", "-3"], 24, "temperature = -3"),
    ],
)
def test_what_cannot_be_asked_is_a_line_and_a_code(
    talking: str, make_engine: Make, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    bare = str(make_engine())
    assert main([argument.format(talking=talking, bare=bare) for argument in arguments]) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and words in shown.err and len(shown.err.splitlines()) <= 2
    assert not shown.out


def test_without_minijinja_run_says_so_and_completes(
    talking: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "icc.runtime.templates.template", None)
    assert main(["run", talking, "-p", "hi", "--max-tokens", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "jk\n" and shown.err.splitlines()[0].startswith("warning: chat templates need")
    assert main(["run", talking, "-p", "hi", "--chat"]) == 3
    assert "pip install" in capsys.readouterr().err


def test_chat_through_a_pipe(talking: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "0", "--max-tokens", "3", "--system", "S"]
    given(monkeypatch, 'hi\n\n/stats\n"""two\nlines"""\n//x\n/regenerate\n/history\n')
    assert main(["chat", talking, *options]) == 0
    shown = capsys.readouterr()
    assert shown.out == "^_`\n" * 4
    assert "system: S" in shown.err and "user: two\nlines" in shown.err and "user: /x" in shown.err
    assert "(cut: max_tokens is reached" in shown.err and "from the cache" in shown.err
    given(monkeypatch, "/nonsense\nhi\n/quit\nhi\n")
    assert main(["chat", talking, *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == "^_`\n" and "/nonsense is no command" in shown.err


class Screen:
    """A process at a pseudo-terminal."""

    def __init__(self, command: list[str]) -> None:
        self._end, other = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            command, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True
        )
        os.close(other)
        self.text = ""

    def send(self, text: str) -> None:
        os.write(self._end, text.encode())

    def shows(self, words: str, seconds: float) -> bool:
        """Read until these words appear; False if they do not within so many seconds."""
        end = time.monotonic() + seconds
        while words not in self.text:
            if not select.select([self._end], [], [], max(end - time.monotonic(), 0))[0]:
                return False
            try:
                self.text += os.read(self._end, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it has ended: {self.text}") from None
        self.text = self.text.partition(words)[2]
        return True

    def expect(self, words: str) -> None:
        assert self.shows(words, 60), self.text

    def close(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            os.close(self._end)


def test_ctrl_c_at_a_terminal_stops_the_answer_alone(make_engine: Make) -> None:
    root = make_engine(tokenizer_files=CONFIG, max_seq_len=60_000, max_step_tokens=512, eos_token_ids=[])
    screen = Screen([sys.executable, "-m", "icc", "chat", str(root), "--temperature", "0", "--threads", "1", "--plain"])
    try:
        screen.expect(">>> ")
        screen.send("hi\n")
        screen.expect("^_`abc")  # an answer of 60,000 tokens has begun
        screen.process.send_signal(signal.SIGINT)
        screen.expect("(stopped)")
        screen.expect(">>> ")
        for _ in range(20):  # input() misses a signal that comes just before it waits for keys
            screen.process.send_signal(signal.SIGINT)
            if screen.shows("Ctrl-D or /quit leaves", 3):
                break
        screen.send("/set max_tokens 4\n")
        screen.expect("max_tokens = 4")
        screen.send("hi\n")
        screen.expect("^_`a")
        screen.expect("max_tokens is reached")
        screen.send("/quit\n")
    finally:
        code = screen.close()
    assert code == 0
