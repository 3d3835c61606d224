"""Writes the first seeds of every target again: `python tests/fuzz/write_corpus.py`. Inputs that were found stay."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "frontend"))
import numpy as np
from changing_onnx import small_model
from fuzz import CORPUS
from gguf_bytes import GOOD, header, padded, pair, tensor, text
from icc.compiler.engine.vocabulary import make_vocabulary
from icc.compiler.packing import pack_engine
from request_pieces import PIECES
from safetensors.numpy import save

TESTS = Path(__file__).parents[1]
SCHEMAS = ("anyOf", "patternProperties", "minLength", "multipleOf", "ref", "uniqueItems", "format", "contains", "enum")
BODIES: dict[str, Any] = {
    "completion": {"model": "m", "prompt": "a", "max_tokens": 3, "logit_bias": {"1": 2.0}, "stop": ["x"],
                   "stream": True},
    "chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
        "top_logprobs": 2, "logprobs": True, "seed": 3,
    },
    "messages": {
        "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "s"}],
        "messages": [{"role": "user", "content": "x"}],
    },
    "responses": {"model": "m", "input": [{"role": "user", "content": "x"}], "instructions": "i", "store": False},
    "ollama": {"model": "m", "messages": [{"role": "user", "content": "x"}], "format": "json",
               "options": {"num_predict": 3}},
    "embedding": {"model": "m", "input": ["a", "b"], "dimensions": 4},
    "rerank": {"model": "m", "query": "q", "documents": ["a", "b"], "top_n": 1},
    "tokenize": {"model": "m", "prompt": "a"},
}  # fmt: skip
GRAMMARS = {
    "lark": 'start: "a" x* | y\nx: /[a-z]{1,3}/ "," \ny: %json {"type": "integer"}\n',
    "gbnf": 'root ::= item+\nitem ::= "- " [^\\n]+ "\\n"\n',
    "regex": "regex:(a|b)+[0-9]{2,4}\\p{L}?",
}
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "checks": "{%- set ns = namespace(n=0) -%}{{ bos_token }}{% for m in messages[1:] %}{% if (m.role == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}{% set ns.n = ns.n + 1 %}[{{ ns.n }}] "
    "{{ m.content }}{% endfor %}{{ tools | tojson if tools }}",
}
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "b",
        "rank_pattern": {"k_proj": 2}, "bias": "none", "task_type": "CAUSAL_LM"}  # fmt: skip


def put(target: str, name: str, data: bytes | str) -> None:
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def toy_engine(folder: Path) -> None:
    """An engine that can be opened, but not run: its kernel libraries are not libraries."""
    spec = importlib.util.spec_from_file_location("toy_engines", TESTS / "runtime" / "conftest.py")
    assert spec is not None and spec.loader is not None
    toys = importlib.util.module_from_spec(spec)
    sys.modules["toy_engines"] = toys
    spec.loader.exec_module(toys)
    (folder / "kernels").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    for name in ("any", "future"):
        (folder / "kernels" / f"{name}.so").write_bytes(b"\x7fELF" + bytes(60))
    toys.write_weights(folder / "weights.safetensors", 0)
    (folder / "program.json").write_bytes(toys.msgspec.json.encode(toys.toy_program()))
    toys.byte_tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"), pretty=False)
    config = {"bos_token": {"content": "<bos>"}, "chat_template": [{"name": "default", "template": "{{ 1 }}"}]}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    toys.seal(folder, toys.toy_manifest())


def write_engine() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "toy"
        toy_engine(root)
        pack_engine(root, Path(name) / "toy.icc")
        put("one_file", "toy.icc", (Path(name) / "toy.icc").read_bytes())
        put("manifest", "plain", (root / "engine.json").read_bytes())
        put("program", "plain", (root / "program.json").read_bytes())
        put("weights", "plain", (root / "weights.safetensors").read_bytes())
        tokens = (root / "tokenizer" / "tokenizer.json").read_bytes()
        put("tokenizer", "plain", tokens)
        put("tokenizer_config", "plain", (root / "tokenizer" / "tokenizer_config.json").read_bytes())
        made = make_vocabulary(tokens)
        assert made is not None
        put("vocabulary", "plain", made)


def write_models() -> None:
    plain = {"a.weight": np.ones((4, 6), np.float32), "b": np.arange(5, dtype=np.int64), "c": np.zeros(0, np.float16)}
    put("safetensors", "plain", save(plain))
    put("onnx", "small", small_model().SerializeToString())
    put("gguf", "plain", GOOD)
    pairs = [
        pair("general.architecture", 8, text("llama")),
        pair("a.list", 9, struct.pack("<IQ", 5, 3) + struct.pack("<3i", 1, 2, 3)),
        pair("a.texts", 9, struct.pack("<IQ", 8, 2) + text("x") + text("")),
        pair("general.alignment", 4, struct.pack("<I", 64)),
        pair("a.float", 6, struct.pack("<f", 0.5)), pair("a.flag", 7, b"\1"),
    ]  # fmt: skip
    put("gguf", "pairs", padded(header(pairs, [tensor("w", (2, 32), 2, 0), tensor("n", (32,), 0, 64)]), bytes(192), 64))
    lora = [
        pair("general.architecture", 8, text("llama")), pair("general.type", 8, text("adapter")),
        pair("adapter.type", 8, text("lora")), pair("adapter.lora.alpha", 6, struct.pack("<f", 4.0)),
    ]  # fmt: skip
    factors = [
        tensor("blk.0.attn_q.weight.lora_a", (2, 32), 0, 0),
        tensor("blk.0.attn_q.weight.lora_b", (16, 2), 0, 256),
    ]
    values = np.linspace(-1, 1, 64 + 32, dtype=np.float32).tobytes()
    put("gguf_adapter", "plain", padded(header(lora, factors), values))
    module = "base_model.model.model.layers.0.self_attn"
    adapter = {f"{module}.{p}.lora_{half}.weight": np.full((2, 8) if half == "A" else (8, 2), 0.1, np.float32)
               for p in ("q_proj", "k_proj") for half in "AB"}  # fmt: skip
    put("peft_weights", "plain", save(adapter))
    put("peft_config", "plain", json.dumps(LORA))
    put("peft_config", "patterns", json.dumps({**LORA, "alpha_pattern": {".*q_proj": 1.5}, "use_rslora": True}))


def main() -> None:
    for name, body in BODIES.items():
        put("requests", name, json.dumps(body))
    put("http", "post", b"".join(PIECES))
    put("http", "get", b"GET /v1/models?a=b HTTP/1.1\r\nhost: a\r\nx-request-id: 1\r\nauthorization: Bearer x\r\n\r\n")
    body = b'{"model": "m", "prompt": "a"}'
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n"
    put("http", "chunked", chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    suite = json.loads((TESTS / "runtime/grammars/suite/draft2020-12.json").read_text())
    for name in SCHEMAS:
        put("schemas", name, json.dumps(suite[name][0]["schema"]))
    nested = {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "maxItems": 3}},
              "$defs": {"b": {"type": "string", "pattern": "^[a-z]{2,5}$"}}, "required": ["a"]}  # fmt: skip
    put("schemas", "nested", json.dumps(nested))
    for name, grammar in GRAMMARS.items():
        put("grammars", name, grammar)
    for name, template in TEMPLATES.items():
        put("chat_templates", name, template)
    keys = TESTS / "runtime" / "data" / "minisign"
    for target, name, file in (
        ("signature", "hashed", "hashed.minisig"), ("signature", "legacy", "legacy.minisig"),
        ("public_key", "plain", "plain.pub"), ("secret_key", "plain", "plain.key"),
        ("secret_key", "locked", "locked.key"),
    ):  # fmt: skip
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        shutil.copy(keys / file, CORPUS / target / name)
    write_engine()
    write_models()


if __name__ == "__main__":
    main()
