"""RELIABILITY S2 and R10: whatever the bytes of an engine are, opening it works or ends in words."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from icc.compiler.engine.vocabulary import make_vocabulary
from icc.runtime.errors import EngineFormatError, IccError
from icc.runtime.format.container import Folder
from icc.runtime.format.files import EngineFiles
from icc.runtime.format.load import open_engine, read_manifest
from icc.runtime.format.programs import decode_program
from icc.runtime.format.vocabulary import Vocabulary
from icc.runtime.format.weights import MappedWeights
from icc.runtime.server.api.model import open_model
from icc.runtime.templates.template import ChatTemplate
from icc.runtime.tokenizer import Tokenizer
from sizes import size_of

EXAMPLES = size_of("fuzz_examples")
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=2000,  # ms for one input; the promise is 1 s
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
EDGES = [0, 1, -1, 7, 8, 63, 64, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30]


@pytest.fixture(scope="module")
def seeds(write_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a toy engine by name."""
    config = json.dumps(
        {"bos_token": {"content": "<bos>"}, "chat_template": [{"name": "default", "template": "{{ 1 }}"}]}
    )
    root = write_engine(tmp_path_factory.mktemp("seed") / "e", tokenizer_files={"tokenizer_config.json": config})
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def mutated(data: bytes, draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    """Bytes changed, cut, doubled, replaced, or a number of the text replaced by an edge case."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "number", "repeat", "any"]))
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "insert":
        return data[:at] + draw(st.binary(min_size=1, max_size=12)) + data[at:]
    if kind == "number":
        digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
        if not digits:
            return data
        at = digits[at % len(digits)]
        return data[:at] + str(draw(st.sampled_from(EDGES))).encode() + data[at + 1 :]
    if kind == "repeat":
        return data[:at] + data[at : at + 40] * draw(st.integers(2, 300)) + data[at:]
    return draw(
        st.binary(max_size=200)
        | st.recursive(st.none() | st.integers(), st.lists).map(lambda v: json.dumps(v).encode())
    )


def total(parse: Callable[[], object]) -> None:
    """Parsing works, or ends in an error of icc."""
    try:
        parse()
    except IccError as error:
        assert error.message and "\n" not in error.message[:200]


@FUZZ
@given(data=st.data())
def test_the_manifest(seeds: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("m", numbered=True)
    (root / "engine.json").write_bytes(mutated(seeds["engine.json"], data.draw))
    total(lambda: read_manifest(root))


@FUZZ
@given(data=st.data())
def test_the_program(seeds: dict[str, bytes], data: st.DataObject) -> None:
    total(lambda: decode_program(mutated(seeds["program.json"], data.draw), "program.json"))


@FUZZ
@given(data=st.data())
def test_the_weights(seeds: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """What our reader of safetensors accepts, the official one accepts too."""
    file = tmp_path_factory.mktemp("w", numbered=True) / "w.safetensors"
    raw = mutated(seeds["weights.safetensors"], data.draw)
    file.write_bytes(raw)

    def parse() -> None:
        MappedWeights(EngineFiles(Folder(file.parent), {}, verify=False).map(file.name), file.name).close()
        safetensors.deserialize(raw)

    total(parse)


@FUZZ
@given(data=st.data())
def test_the_tokenizer(seeds: dict[str, bytes], data: st.DataObject) -> None:
    total(lambda: Tokenizer(mutated(seeds["tokenizer/tokenizer.json"], data.draw)).encode("a text"))


@FUZZ
@given(data=st.data())
def test_the_vocabulary(seeds: dict[str, bytes], data: st.DataObject) -> None:
    tokens = seeds["tokenizer/tokenizer.json"]
    made = make_vocabulary(tokens)
    assert made is not None
    total(lambda: Tokenizer(tokens, Vocabulary(mutated(made, data.draw))).encode("a text"))


@FUZZ
@given(data=st.data())
def test_the_tokenizer_settings(
    seeds: dict[str, bytes],
    write_engine: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    raw = mutated(seeds["tokenizer/tokenizer_config.json"], data.draw)
    root = tmp_path_factory.mktemp("c", numbered=True) / "e"
    for name, content in seeds.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    manifest = json.loads(seeds["engine.json"])
    manifest["files"]["tokenizer/tokenizer_config.json"] |= {"size": len(raw)}
    manifest["digest"] = ""
    (root / "tokenizer" / "tokenizer_config.json").write_bytes(raw)
    (root / "engine.json").write_text(json.dumps(manifest))
    total(lambda: open_model(root, verify=False))


@FUZZ
@given(source=st.text(alphabet="{%}#-= abif'\"|()[].:~+*0123456789\n", max_size=120))
def test_the_chat_template(source: str) -> None:
    total(lambda: ChatTemplate(source, {}).render([{"role": "user", "content": "x"}]))


def test_every_changed_byte_is_refused_and_the_file_named(
    seeds: dict[str, bytes], write_engine: Callable[..., Path], tmp_path: Path
) -> None:
    """R10: XOR with 0x01 and 0xFF, of the manifest every 11th byte and of other files every 211th; in `make soak` every
    third, and every one."""
    root = write_engine(tmp_path / "e")
    step = 1 if EXAMPLES > 1000 else 211
    start, tried = time.monotonic(), 0
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        content = file.read_bytes()
        name = file.relative_to(root).as_posix()
        for at in range(0, len(content), (11 if step > 1 else 3) if name == "engine.json" else step):
            for mask in (0x01, 0xFF):
                file.write_bytes(content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :])
                with pytest.raises(EngineFormatError) as refused:
                    open_engine(root)
                assert name in refused.value.message or name == "engine.json", (name, at)
                tried += 1
        for size in range(0, len(content), max(len(content) // 20, 1)):
            file.write_bytes(content[:size])
            with pytest.raises(EngineFormatError):
                open_engine(root)
        file.write_bytes(content)
    open_engine(root).close()
    assert tried > 400 and (time.monotonic() - start) / tried < 1
