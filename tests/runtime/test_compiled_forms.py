"""`icc compile --schema` and `--grammar`: grammars of answers are lowered in the engine, and ready when it is
loaded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import icc
import msgspec
import pytest
import tokenizers
from icc.compiler.engine.earlier import EarlierEngine
from icc.compiler.measure import check_readable, lower_forms
from icc.compiler.prompt_files import read_form_file
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.errors import UsageError
from icc.runtime.format.forms import FORMS_FILE, CompiledForms
from icc.runtime.format.load import open_engine
from icc.runtime.grammars import constraints
from icc.runtime.requests.params import SamplingParams
from icc.runtime.server.api.model import open_model

from .conftest import byte_tokenizer

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
GRAMMAR = 'start: "yes" | "no"\n'


@pytest.fixture
def engine(
    make_engine: Callable[..., Path], seal: Callable[..., None], toy_manifest: Callable[..., Any], tmp_path: Path
) -> Path:
    (tmp_path / "order.json").write_text(json.dumps(SCHEMA, indent=2))
    (tmp_path / "said.lark").write_text(GRAMMAR)
    files = [read_form_file(tmp_path / "order.json", "schema"), read_form_file(tmp_path / "said.lark", "grammar")]
    root = make_engine()
    (root / FORMS_FILE).write_bytes(msgspec.json.encode(CompiledForms(lower_forms(files))))
    seal(root, toy_manifest())
    return root


def test_the_first_use_compiles_nothing(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    with icc.load(engine) as llm:
        grammars = llm.prompting.grammars
        assert grammars is not None
        end = time.monotonic() + 20
        while len(grammars._compiled) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)

        def never(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("it is compiled again")

        monkeypatch.setattr(constraints, "lowered", never)
        monkeypatch.setattr(llguidance, "LLMatcher", never)
        [one] = llm.generate(["a"], SamplingParams(max_tokens=40, temperature=0, json_schema=SCHEMA))
        assert one.text.startswith('{"n":')
        [said] = llm.generate(["a"], SamplingParams(max_tokens=4, temperature=0, grammar=GRAMMAR))
        assert said.text in ("yes", "no")


def test_a_delta_has_those_of_its_base_and_its_own(engine: Path, tmp_path: Path) -> None:
    """None in its own file if it is given none: it reads that of its base."""
    (tmp_path / "no.lark").write_text('start: "no"')
    [known, own] = lower_forms(
        [read_form_file(tmp_path / name, kind) for name, kind in (("order.json", "schema"), ("no.lark", "grammar"))]
    )
    program: Any = None  # forms do not need it
    base = EarlierEngine(open_engine(engine), program, as_base=True)
    assert base.forms_and([]) == []
    assert [form.source for form in base.forms_and([known, own])] == ["order.json", "said.lark", "no.lark"]
    assert len(replace(base, as_base=False).forms_and([])) == 2
    base.close()


def test_what_an_engine_was_compiled_with_is_never_given_up(engine: Path) -> None:
    with icc.load(engine) as llm:
        grammars = llm.prompting.grammars
        assert grammars is not None
        grammars.prepare()
        kept = set(grammars._compiled)
        for n in range(constraints._CACHED + 5):
            grammars.compile(json.dumps({"regex": f"a{{{n + 1}}}"}))
        assert kept <= set(grammars._compiled) and len(grammars._compiled) == constraints._CACHED + 2


def test_the_server_asks_nobody_to_lower_it(engine: Path) -> None:
    from icc.runtime.grammars.sources import of_lark, of_schema

    forms = open_model(engine).forms
    assert set(forms) == {of_schema(SCHEMA), of_lark(GRAMMAR)}
    assert all("grammar" in json.loads(lowered) for lowered in forms.values())


def test_inspect_shows_them(engine: Path) -> None:
    rows: Any = describe_engine(engine)["grammars"]
    assert [(row["file"], row["is"]) for row in rows] == [("order.json", "schema"), ("said.lark", "grammar")]


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("schema", "{", "is no JSON"),
        ("schema", "[1]", "is no JSON schema"),
        ("schema", '{"type": "integer", "minimum": 3, "maximum": 2}', "no value satisfies"),
        ("grammar", "start: [", "was refused"),
        ("grammar", " ", "is empty"),
    ],
)
def test_mistakes_are_told_in_a_line(kind: Any, text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "form").write_text(text)
    with pytest.raises(UsageError, match=why) as caught:
        lower_forms([read_form_file(tmp_path / "form", kind)])
    assert f"--{kind} {tmp_path / 'form'}" in caught.value.message and "\n" not in caught.value.message


def test_a_tokenizer_that_grammars_cannot_read(tmp_path: Path) -> None:
    """The compile refuses it. For an older engine, the thread that compiles its grammars does not fail with a
    traceback."""
    unread = tmp_path / "tokenizer.json"
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "<eos>": 2}, []))
    letters.decoder = tokenizers.decoders.Fuse()
    letters.save(str(unread))
    (tmp_path / "said.lark").write_text(GRAMMAR)
    file = read_form_file(tmp_path / "said.lark", "grammar")
    with pytest.raises(UsageError, match="grammars cannot read the model's tokenizer") as caught:
        check_readable(file, unread, 3)
    assert "\n" not in caught.value.message and caught.value.message.startswith(file.option)
    constraints.Grammars(unread.read_text(), 3, [2], lower_forms([file])).prepare()
    byte_tokenizer().save(str(unread))
    check_readable(file, unread, 258)
