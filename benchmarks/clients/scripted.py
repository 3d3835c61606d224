"""A server whose model is a script, so that clients can be tested without a trained model: the HTTP process, the engine
process, templates, grammars and tools are icc's own; only the logits come from `reply`.

python benchmarks/clients/scripted.py FOLDER [PORT [TEMPLATE]]        TEMPLATE: a file, for another chat template

The model answers in words; if its template shows tools and no tool result yet, it calls the first tool. Under a
grammar it ends strings, lists and numbers as soon as the grammar allows. It continues a bare text by counting.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from icc.runtime.format.digest import encode_sealed
from icc.runtime.format.manifest import (
    FORMAT_VERSION,
    KERNEL_ABI,
    FileEntry,
    Limits,
    Manifest,
    ModelFacts,
    ProgramEntry,
    QuantFacts,
    SamplingDefaults,
)
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor
from icc.runtime.options import LoadOptions
from icc.runtime.parent import die_with_parent
from icc.runtime.server.engine.channel import Channel
from icc.runtime.server.engine.grammars import CompiledGrammars
from icc.runtime.server.engine.worker import Worker
from icc.runtime.tokenizer import Tokenizer

MODEL = "scripted"
_VOCAB, _EOS = 257, 256
_LENGTH = 8192
_NO_KERNELS = ("weights.safetensors", "program.json")  # must be listed for the HTTP process, which does not read them
_WORDS = "Hello there, friend."
_TURN, _CALL = "<|im_start|>assistant\n", "<tool_call>\n"
# bytes that end a string, list or number are preferred to others that a grammar allows
_ENDS = {'"': 5.0, "}": 4.5, "]": 4.0, ",": 3.5, **dict.fromkeys("0123456789", 2.0), "-": -1.0, " ": -5.0, "\n": -5.0}

TEMPLATE = r"""{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}{% endif %}
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each call, return JSON within tags:
<tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif not (tools and loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
{%- set call = call.function or call %}<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def reply(prompt: str) -> str:
    """The model's answer to a rendered conversation."""
    tools = re.search(r"(?:<tools>|You can call these tools:\n)(.*?)(?:</tools>|\n\n)", prompt, re.DOTALL)
    if tools is None or prompt.rstrip().endswith("</tool_response><|im_end|>"):
        return _WORDS
    tool = json.loads(tools[1].strip().splitlines()[0])
    function = tool.get("function", tool)
    call = {"name": function["name"], "arguments": example(function.get("parameters") or {}, {})}
    return f"{_CALL}{json.dumps(call, separators=(',', ':'))}\n</tool_call>"


def example(schema: dict[str, Any], definitions: dict[str, Any]) -> Any:
    """A small value that a schema of the usual kinds allows."""
    definitions = {**definitions, **schema.get("$defs", {})}
    if "$ref" in schema:
        return example(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    if "const" in schema:
        return schema["const"]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example(schema[key][0], definitions)
    if "properties" in schema or schema.get("type") == "object":
        found = schema.get("properties", {})
        return {
            name: example(part, definitions) for name, part in found.items() if name in schema.get("required", found)
        }
    if schema.get("type") == "array":
        return [example(schema.get("items", {}), definitions)]
    return {"integer": 3, "number": 1.5, "boolean": True, "null": None}.get(schema.get("type", ""), "Oslo")


class ScriptedExecutor(FakeExecutor):
    """The script's token gets the largest logit; next come tokens that end what is open, for grammars."""

    def _logits(self, context: list[int]) -> np.ndarray:
        row = np.zeros(self.vocab_size, dtype=np.float32)
        for char, value in _ENDS.items():
            row[ord(char)] = value
        row[following(context)] = 30.0
        return row


def following(context: Sequence[int]) -> int:
    """The next token of a conversation's answer, or of a bare text, which counts up to z."""
    text = bytes(token for token in context if token < 256).decode(errors="replace")
    prompt, turn, said = text.rpartition(_TURN)
    if not turn:
        last = context[-1]
        return last + 1 if ord("a") <= last < ord("z") else _EOS if last == ord("z") else ord("a")
    wanted = reply(prompt)
    if wanted.startswith(said) and len(said) < len(wanted):
        return ord(wanted[len(said)])
    return _EOS


def write_engine(folder: Path, template: str = TEMPLATE) -> Path:
    """Write an engine directory without kernels, with only the files that the HTTP process reads."""
    engine = folder / f"{MODEL}.engine"
    (engine / "tokenizer").mkdir(parents=True, exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    byte_of = {char: byte for byte, char in enumerate(map(_stand_in, range(256)))}
    assert set(byte_of) == set(alphabet)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_of, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(engine / "tokenizer" / "tokenizer.json"))
    (engine / "tokenizer" / "chat_template.jinja").write_text(template)
    for name in _NO_KERNELS:
        (engine / name).write_bytes(b"")
    (engine / "engine.json").write_bytes(encode_sealed(_manifest(engine)))
    return engine


def _manifest(engine: Path) -> Manifest:
    files = [path for path in sorted(engine.rglob("*")) if path.is_file() and path.name != "engine.json"]
    return Manifest(
        format_version=FORMAT_VERSION,
        icc_version="0.1.0",
        target="cpu",
        backend="cpu",
        model=ModelFacts("Scripted", _VOCAB, 1, 1, 2, _LENGTH, None, [_EOS], None),
        quantization=QuantFacts("none", 32.0, []),
        limits=Limits(_LENGTH, 8, 4096),
        sampling=SamplingDefaults(temperature=0.0),
        programs={"main": ProgramEntry(program=_NO_KERNELS[1], weights=_NO_KERNELS[0])},
        tokenizer_dir="tokenizer",
        files={
            path.relative_to(engine).as_posix(): FileEntry(
                path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
            )
            for path in files
        },
        kernel_abi=KERNEL_ABI["cpu"],
    )


def _stand_in(byte: int) -> str:
    """GPT-2's printable character for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [other for other in range(256) if other not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def work(fd: int, engine: Path) -> None:
    """The engine process."""
    die_with_parent()
    tokenizer = Tokenizer((engine / "tokenizer" / "tokenizer.json").read_bytes())
    device = ScriptedExecutor(
        vocab_size=_VOCAB,
        num_blocks=16 * _LENGTH // 16,
        block_size=16,
        max_batch_size=8,
        max_step_tokens=4096,
        max_logit_rows=4096,
    )
    llm = LLM(_manifest(engine), device, tokenizer)
    Worker(llm, Channel(socket.socket(fileno=fd)), CompiledGrammars.of(llm)).run()


def main(arguments: list[str]) -> int:
    if arguments[0] == "--worker":
        work(int(arguments[1]), Path(arguments[2]))
        return 0
    from icc.runtime.server.http.serve import serve
    from icc.runtime.server.options import ServeOptions

    template = Path(arguments[2]).read_text() if len(arguments) > 2 else TEMPLATE
    engine = write_engine(Path(arguments[0]), template)
    command = [sys.executable, __file__, "--worker", "{fd}", str(engine)]
    port = int(arguments[1]) if len(arguments) > 1 else 0
    return serve(ServeOptions(LoadOptions(str(engine)), port=port, command=command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
