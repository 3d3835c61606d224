"""The parsers of files and messages that others write, each as a function of bytes."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httptools  # noqa: F401  before anything is measured
import numpy as np
import safetensors
from changing import BYTES, JSON, lines, near, safetensors_header, words
from changing_onnx import CHANGES, as_change
from fuzz import CORPUS, Target
from http_parser import bodies, conversation
from icc.runtime.adapters.gguf import GgufNames, read_gguf
from icc.runtime.adapters.reader import read_adapter
from icc.runtime.errors import UsageError
from icc.runtime.format.files import EngineFiles
from icc.runtime.format.folder import Folder
from icc.runtime.format.gguf import read_container
from icc.runtime.format.load import open_engine, read_manifest
from icc.runtime.format.open_container import open_container
from icc.runtime.format.programs import decode_program
from icc.runtime.format.vocabulary import Vocabulary
from icc.runtime.format.weights import MappedWeights
from icc.runtime.grammars.compiling import lowered
from icc.runtime.grammars.sources import of_lark, of_regex, of_schema
from icc.runtime.server.api.decoding import decoded
from icc.runtime.server.api.model import open_model
from icc.runtime.templates.template import ChatTemplate
from icc.runtime.tokenizer import Tokenizer
from icc.runtime.trust.minisign import PublicKey, SecretKey
from request_pieces import mutated

JINJA = (
    "{{", "}}", "{%", "%}", "{#", "#}", "{%-", "-%}", "{{ '", "for", "endfor", "in", "if", "elif", "else", "endif",
    "set",
    "macro", "endmacro", "call", "filter", "block", "include 'x'", "import", "extends", "raw", "endraw", "namespace()",
    "messages", "message.content", "m['role']", "loop.index", "range(10**9)", "|tojson", "|length", "|join", "|map(",
    "|selectattr(", "[::-1]", "[99]", ".a.b", "is defined", "is mapping", "not", "and", "or", "~", "**", "//", "%",
    "raise_exception('x')", "strftime_now('%Y')", "{}", "[]", "(", ")", "'", '"', "none", "true", "1", "-1", "\u202e",
)  # fmt: skip
LARK = (
    "start:", "x:", "X:", "|", "\n", "(", ")", "[", "]", "?", "*", "+", "{1,3}", "{9999999}", "~", "/a+/", "/(a+)+$/",
    "/[^/", "/(?=a)/", "/\\p{L}/i", '"a"', '"a"i', '"a".."z"', "%json {}", "%ignore", "%import common.NUMBER",
    "%regex {}",
    "->", "!", "::=", "[^a-z]", "&", "//x", "start: start start", "\\", "\u0000",
)  # fmt: skip
SCHEMA = (
    '"type":"object",', '"type":["null","array"],', '"$ref":"#",', '"$ref":"#/$defs/a",', '"anyOf":[],',
    '"allOf":[{}],',
    '"oneOf":[{},{}],', '"not":{},', '"pattern":"(a+)+$",', '"pattern":"(?=a)\\\\1",', '"multipleOf":1e-300,',
    '"minimum":1e400,', '"maxLength":99999999999,', '"minItems":4294967296,', '"uniqueItems":true,', '"enum":[],',
    '"const":null,', '"required":["a"],', '"additionalProperties":false,', '"patternProperties":{"^a":{}},',
    '"prefixItems":[{}],', '"contains":{},', '"if":{},', '"format":"date-time",', '"dependentRequired":{"a":["b"]},',
    '"propertyNames":{"maxLength":0},', '"unevaluatedProperties":false,', '"$id":"x",', '"$schema":"x",', "true", "{",
)  # fmt: skip


@functools.cache
def _folder() -> Path:
    """The folder for inputs that are read as files."""
    _folder.kept = tempfile.TemporaryDirectory(prefix="icc-fuzz-")  # type: ignore[attr-defined]
    return Path(_folder.kept.name)  # type: ignore[attr-defined]


def as_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Make a parser of bytes from a parser of files."""

    def parse(data: bytes) -> object:
        path = _folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return parse


def _weights(path: Path) -> None:
    """Our reader of safetensors accepts only files that the official one accepts, too."""
    MappedWeights(EngineFiles(Folder(path.parent), {}, verify=False).map(path.name), path.name).close()
    safetensors.deserialize(path.read_bytes())


@functools.cache
def _toy() -> dict[str, bytes]:
    """The files of a toy engine, by name."""
    container = open_container(CORPUS / "one_file" / "toy.icc")
    return {name: container.read(name) for name in container.sizes()}


def _engine_with(name: str, data: bytes) -> Path:
    """The toy engine with one file replaced; its manifest has the size of this file, but not its digest."""
    root = _folder() / "engine"
    manifest = json.loads(_toy()["engine.json"])
    manifest["files"][name] = {"size": len(data), "sha256": "0" * 64}
    manifest["digest"] = ""
    for file, content in {**_toy(), name: data, "engine.json": json.dumps(manifest).encode()}.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(content)
    return root


def _one_file(path: Path) -> None:
    """An IccError, or the same engine: never another one."""
    engine = open_engine(path)
    try:
        for name in ("program.json", "weights.safetensors"):
            assert engine.files.read(name) == _toy()[name], f"another {name} was read"
    finally:
        engine.close()


def _adapter(config: bytes | None = None, weights: bytes | None = None) -> None:
    """Read a PEFT adapter, one of whose files is the input, and look at each of its changes."""
    folder = _folder() / "adapter"
    folder.mkdir(exist_ok=True)
    plain = {"adapter_config.json": "peft_config", "adapter_model.safetensors": "peft_weights"}
    for (name, corpus), given in zip(plain.items(), (config, weights), strict=True):
        (folder / name).write_bytes((CORPUS / corpus / "plain").read_bytes() if given is None else given)
    adapter = read_adapter(folder)
    for name, change in adapter.changes.items():
        assert name and (change.low_rank is None or np.isfinite(change.low_rank.scale)), name


def _gguf(path: Path) -> None:
    found, size = read_container(path), path.stat().st_size
    assert all(0 <= t.start <= t.end <= size for t in found.tensors.values()), "a tensor lies outside of the file"


def _schema(data: bytes) -> object:
    schema = decoded(data, dict[str, Any] | bool)  # type: ignore[arg-type]
    return lowered(of_schema(schema))  # type: ignore[arg-type]


def _grammar(data: bytes) -> object:
    text = data.decode(errors="replace")
    if text.startswith("regex:"):
        return lowered(of_regex(text.removeprefix("regex:")))
    return lowered(of_lark(text))


def _template(data: bytes) -> object:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]
    return ChatTemplate(data.decode(errors="replace"), {"bos_token": "<s>"}).render(messages)


def _no_password() -> bytes:
    raise UsageError("no password is given")


def _signature(data: bytes) -> object:
    """The signed file and the trusted comment are those of the seed, whatever else is in the signature."""
    key = PublicKey.parse((CORPUS / "public_key" / "plain").read_text())
    comment = key.verify(data.decode(errors="replace"), b"A message of icc.\n")
    assert comment in {"timestamp:1795770786\tfile:message.txt\thashed", _legacy()}, "another comment was believed"
    return comment


@functools.cache
def _legacy() -> str:
    return (CORPUS / "signature" / "legacy").read_text().splitlines()[2].removeprefix("trusted comment: ")


def _import_torch() -> None:
    import icc.compiler.frontend.source.checkpoint
    import icc.compiler.frontend.source.onnx.source  # noqa: F401


def _checkpoint(path: Path) -> None:
    from icc.compiler.frontend.source.checkpoint import open_checkpoint

    for tensor in open_checkpoint(path.parent).values():
        tensor.load()


def _onnx(path: Path) -> None:
    from icc.compiler.frontend.source.onnx.source import OnnxFile

    OnnxFile(path).build(False, "generate")


ZIP = near(b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7")
GGUF_NAMES = GgufNames("llama", {"model.layers.0.self_attn.q_proj.weight": ("blk.0.attn_q.weight",)}, {})
ALL = (
    Target("http", conversation, (lambda data, chance, seeds: mutated(chance), *BYTES, lines)),
    Target("requests", bodies, JSON),
    Target("schemas", _schema, (*JSON, words(SCHEMA)), 0.5, 2.0),
    Target("grammars", _grammar, (*BYTES, words(LARK), words(LARK), lines), 1.0, 2.0),
    Target("chat_templates", _template, (*BYTES, words(JINJA), words(JINJA), words(JINJA))),
    Target("manifest", as_file("manifest/engine.json", lambda path: read_manifest(path.parent)), JSON),
    Target("program", lambda data: decode_program(data, "program.json"), JSON),
    Target("weights", as_file("weights/w.safetensors", _weights), (*BYTES, safetensors_header, safetensors_header)),
    Target("tokenizer", lambda data: Tokenizer(data).encode("a text"), JSON, 0.3),
    Target(
        "tokenizer_config",
        lambda data: open_model(_engine_with("tokenizer/tokenizer_config.json", data), verify=False),
        JSON,
        0.2,
    ),
    Target(
        "vocabulary",
        lambda data: Tokenizer(_toy()["tokenizer/tokenizer.json"], Vocabulary(data)).encode("a text"),
        BYTES,
    ),
    Target("one_file", as_file("one.icc", _one_file), (*BYTES, ZIP, ZIP, ZIP), 0.3),
    Target("signature", _signature, (*BYTES, lines)),
    Target("public_key", lambda data: PublicKey.parse(data.decode(errors="replace")).text(), (*BYTES, lines)),
    Target("secret_key", lambda data: SecretKey.parse(data.decode(errors="replace"), _no_password), (*BYTES, lines)),
    Target("peft_config", lambda data: _adapter(config=data), JSON, 0.5),
    Target("peft_weights", lambda data: _adapter(weights=data), (*BYTES, safetensors_header, safetensors_header), 0.5),
    Target("gguf", as_file("a.gguf", _gguf), (*BYTES, near(b"general.", b"w", reach=40))),
    Target(
        "gguf_adapter", as_file("adapter.gguf", lambda path: read_gguf(path, GGUF_NAMES)), (*BYTES, near(b"adapter."))
    ),
    Target(
        "safetensors",
        as_file("checkpoint/model.safetensors", _checkpoint),
        (*BYTES, safetensors_header, safetensors_header),
        before=_import_torch,
    ),
    Target("onnx", as_file("onnx/m.onnx", _onnx), (*BYTES, *map(as_change, CHANGES)), 0.3, before=_import_torch),
)
TARGETS = {target.name: target for target in ALL}
