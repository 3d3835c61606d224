"""The part of identity.py that depends on icc's internals: compiling without a GPU's compiler, and reading engines.

Its results do not depend on them: rendered text, packed bytes, addresses, tokens. If you move a module or change
program.json, change this file, never the digests.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import icc
import icc.compiler.tracing as tracing
import numpy as np
import torch
from icc.compiler.backends.cpu.isa import host_isas
from icc.compiler.backends.triton import fallback
from icc.compiler.backends.triton.objects.compile import Compiled, spec_key

CXX = Path(__file__).with_name("identity_cxx")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "icc" / "identity"
TOKENS = 24  # generated per prompt


@dataclass
class Contents:
    """An engine as text and bytes.

    texts: rendered sources, compiler calls, launches. groups: texts that are compared as one, under one name. facts:
    texts that are short enough to be kept without digesting. local: bytes that may differ on another machine: weights,
    tokens, logits.
    """

    texts: dict[str, str] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    local: dict[str, list[bytes]] = field(default_factory=dict)


def machine() -> str:
    """The names and versions, besides icc's, on which packed floats, tokens and logits may depend."""
    vendor = re.search(r"vendor_id\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text())
    gxx = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    tensors = f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return f"{vendor[1] if vendor else 'unknown'} {host_isas()[0].name}, {tensors}, g++ {gxx}"


@dataclass
class Compiler:
    """Compiles checkpoints to engines in which only the library for this machine has code.

    The last traced graph is reused, so compile all engines of a checkpoint one after the other.
    """

    folder: Path
    specs: dict[str, Any] = field(default_factory=dict)
    _traced: tuple[Any, Any] = (None, None)

    def compile(self, model: Path, output: Path, fast: bool, **options: Any) -> Contents:
        """Compile an engine and read its contents. fast: compile the library without optimization. Raises IccError."""
        self.specs = {}
        notes = self.folder / "commands"
        notes.mkdir(exist_ok=True)
        for old in notes.iterdir():
            old.unlink()
        environment = {
            "CXX": str(CXX), "IDENTITY_NOTES": str(notes), "IDENTITY_LEVEL": host_isas()[0].name,
            "IDENTITY_CACHE": str(CACHE), "IDENTITY_FLAGS": "-O0" if fast else "",
        }  # fmt: skip
        with mock.patch.dict(os.environ, environment), self._without_objects(), self._traced_once():
            icc.compile(model, output, **options)
        program = json.loads((output / "program.json").read_text())
        contents = Contents()
        if program.get("plan"):
            _read_kernels(self.specs, contents)
            _read_launches(program, self.specs, contents)
        for path in sorted((output / "kernels").glob("*.cpp")):
            contents.texts[f"source {path.name}"] = path.read_text()
            contents.texts[f"command {path.name}"] = (notes / path.name).read_text()
        _read_facts(program, contents)
        _read_weights(program, output / "weights.safetensors", contents)
        return contents

    @contextlib.contextmanager
    def _without_objects(self) -> Iterator[None]:
        """Inside this block GPU kernels are rendered and planned, and kept in `specs`, but not compiled."""

        def compile_specs(specs: Any, *_: object, **__: object) -> dict[str, Compiled]:
            self.specs = {spec_key(spec): spec for spec in specs}
            return {key: Compiled(spec.entry, b"", 0, 0, 0, 0) for key, spec in self.specs.items()}

        with (
            mock.patch.object(fallback, "compile_specs", compile_specs),
            mock.patch.object(fallback, "check_launch", lambda *_: None),
            mock.patch.object(fallback, "check_addresses", lambda *_: None),  # reads compiled objects
        ):
            yield

    @contextlib.contextmanager
    def _traced_once(self) -> Iterator[None]:
        load_graph = tracing.load_graph

        def load(*args: Any, **options: Any) -> Any:
            key = args, tuple(options.items())
            if self._traced[0] != key:
                self._traced = key, load_graph(*args, **options)
            return copy.deepcopy(self._traced[1])  # passes change it

        with mock.patch.object(tracing, "load_graph", load):
            yield


def run(engine: Path, prompts: list[Any], ids: list[int], embeds: bool) -> dict[str, list[bytes]]:
    """Run an engine: tokens of the prompts (greedy, and drawn with a seed) and the logits after each of `ids`; with
    `embeds`, the embeddings of the prompts."""
    with icc.load(engine, isa=host_isas()[0].name, threads=1) as llm:
        if embeds:
            return {"embeddings": [llm.embed(prompts).tobytes()]}
        found = {"logits": [np.ascontiguousarray(llm.logits(ids)).tobytes()]}
        for name, options in {"greedy": {"temperature": 0.0}, "drawn": {"temperature": 0.9, "seed": 7}}.items():
            done = llm.generate(prompts, icc.SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options))
            found[f"{name} tokens"] = [json.dumps([list(c.token_ids) for c in done]).encode()]
        return found


def _read_kernels(specs: dict[str, Any], contents: Contents) -> None:
    for spec in specs.values():
        contents.groups.setdefault(f"kernels {spec.entry}", []).append(_kernel_text(spec))


def _kernel_text(spec: Any) -> str:
    arguments = " ".join(f"{a.name}:{a.type}{'' if a.aligned else '?'}" for a in spec.args)
    return f"# {spec.entry}({arguments}) {spec.num_warps} warps, {spec.num_stages} stages\n{spec.source}"


def _read_launches(program: dict[str, Any], specs: dict[str, Any], contents: Contents) -> None:
    """Add each phase's launches in order, operands as addresses, so that names of buffers do not matter."""
    buffers = {b["name"]: b for b in program["buffers"]}

    def operand(found: dict[str, Any]) -> str:
        space, name, offset = found["space"], found["name"], found.get("offset", 0)
        if space == "buffer":
            return f"arena[{buffers[name]['offset']}]+{offset}*{buffers[name]['dtype']}"
        return f"{space} {'' if (space, name) == ('output', 'logits') else name}+{offset}"

    def argument(arg: list[Any], call: dict[str, Any]) -> str:
        kind, *rest = arg
        known: dict[str, Callable[[], str]] = {
            "operand": lambda: operand(call["operands"][rest[0]]),
            "kv": lambda: f"kv of layer {call['layer']}",
            "scratch": lambda: f"scratch:{rest[1]}",
            "sampling": lambda: f"sampling:{rest[0]}",
            "sampled": lambda: f"sampled:{rest[0]}",
            "counters": lambda: "counters",
        }
        return known[kind]() if kind in known else str(rest[0])

    def line(launch: dict[str, Any], call: dict[str, Any]) -> str:
        args = [argument(arg, call) for arg in launch["args"]]
        grid = ["+".join([str(d["constant"]), *map(term, d["terms"])]) for d in launch["grid"]]
        text = texts[launch["object"]]
        number = numbers.setdefault(text, len(numbers))  # numbered by first launch, whatever its text
        return f"{specs[launch['object']].entry}#{number} <{', '.join(grid)}> ({', '.join(args)})"

    def term(found: dict[str, Any]) -> str:
        return f"{found['times']}*ceil({found['size']}/{found['divide']})"

    texts = {key: _kernel_text(spec) for key, spec in specs.items()}
    numbers: dict[str, int] = {}
    for phase in program["plan"]["phases"]:
        lines = [f"before: {line(launch, {})}" for launch in phase["before"]]
        for i, call in enumerate(program["plan"]["calls"]):
            lines += [f"{i}: {line(launch, call)}" for launch in phase["launches"][call["kernel"]]]
        lines += [f"after: {line(launch, {})}" for launch in phase["after"]]
        kind = "decode" if phase["decode"] else "mixed"
        contents.texts[f"launches {kind} {phase['max_tokens']:4}"] = "\n".join(lines) + "\n"


def _read_facts(program: dict[str, Any], contents: Contents) -> None:
    groups = program["kv"]["groups"]
    kinds = sorted({f"blocks of {group['block_size']} {group['dtype']}" for group in groups})
    layers = [
        f"{k.get('kv_heads', 0)}x({k.get('key_dim', 0)}+{k.get('value_dim', 0)}) window {group.get('size', 0)}"
        for group in groups
        for k in group["layers"].values()
    ]
    contents.facts["arena"] = f"{program['arena_bytes_per_token']} bytes per token"
    contents.facts["kv"] = f"{', '.join(kinds)}; {len(layers)} layers, {sorted(set(layers))}"
    if program.get("plan"):
        contents.facts["scratch"] = f"{program['plan']['scratch_bytes']} bytes"
    for section in program.get("sections", ()):
        bounds = f"steps {section['begin']} to {section['end']}, shared {section.get('shared', 0)}"
        contents.facts[f"section {section['name']}"] = bounds
    speculation = program.get("speculation")
    if speculation:
        contents.local["speculation"] = [json.dumps(speculation, sort_keys=True).encode()]


def _read_weights(program: dict[str, Any], file: Path, contents: Contents) -> None:
    """Add the weights; names that differ only in numbers form one group, in the order of the program."""
    with file.open("rb") as data:
        header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
        start = data.tell()
        for name, weight in program["weights"].items():
            begin, end = header[name]["data_offsets"]
            data.seek(start + begin)
            group = f"weights {re.sub(r'[0-9]+', '*', name)} {weight['format']} {weight['shape']}"
            contents.local.setdefault(group, []).append(data.read(end - begin))
