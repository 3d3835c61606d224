"""Reads the programs of an engine by name, and checks that they agree with engine.json."""

from __future__ import annotations

from math import prod

from ..errors import EngineFormatError, KVLayoutError
from ..kv.policy import EVICTING, POLICIES
from .batch import declaration_problem
from .decoding import COPY_AGAIN, decode
from .files import EngineFiles
from .kv import MAX_BLOCK_SIZE, KVGroup
from .kv_numbers import KV_NUMBERS
from .manifest import FORMAT_VERSION, MAIN, Manifest
from .present import MANIFEST_FILE
from .program import DRAFTS, LOGITS, Program, Section
from .version2 import with_what_sections_take

_ARRAYS = (LOGITS, DRAFTS, "logit_rows")  # places, besides buffers, of inputs and outputs of sections


def read_program(manifest: Manifest, files: EngineFiles, name: str = MAIN) -> Program:
    """Read a program of an engine. EngineFormatError if there is none of that name, or if its file is damaged."""
    entry = manifest.program(name)
    return decode_program(files.read(entry.program), entry.program, manifest.format_version)


def decode_program(raw: bytes, name: str, version: int = FORMAT_VERSION) -> Program:
    """Decode the content of a program's file `name` strictly. version: its format version, one of READ_VERSIONS."""
    program = decode(raw, name, Program)
    return program if version == FORMAT_VERSION else with_what_sections_take(program)


def check_agreement(manifest: Manifest, program: Program, name: str = MAIN) -> None:
    """Raise EngineFormatError if the manifest and its program of that name disagree, or if this runtime does not
    support its KV cache. The manifest states the width of a row for the main program only."""
    file = manifest.program(name).program
    if name == MAIN:
        embedding = manifest.embedding
        found, stated = program.vocab_size, manifest.model.vocab_size if embedding is None else embedding.row_width
        if found != stated:
            raise EngineFormatError(f"{file}: vocab_size is {found}, {MANIFEST_FILE} says {stated}", COPY_AGAIN)
        if program.samples != (embedding is None):
            raise EngineFormatError(f"{file} and {MANIFEST_FILE} disagree about embeddings", COPY_AGAIN)
    if (program.plan is None) != (manifest.backend == "cpu") or (manifest.gpu is None) != (manifest.backend == "cpu"):
        raise EngineFormatError(f"{file}: its launch plan does not go with {MANIFEST_FILE}", COPY_AGAIN)
    for kernel, found in program.plan.objects.items() if program.plan else ():
        if found.file not in manifest.files:
            raise EngineFormatError(f"{file}: object {kernel} is not listed in {MANIFEST_FILE}", COPY_AGAIN)
    if problem := declaration_problem(program.inputs):
        raise EngineFormatError(f"{file}: {problem}", COPY_AGAIN)
    for section in program.sections:
        if problem := section_problem(program, section) or _outside_arena(program, section):
            raise EngineFormatError(f"{file}: section {section.name}: {problem}", COPY_AGAIN)
    for group in program.kv.groups:
        _check_group(group)
    limits = manifest.limits
    if min(limits.max_seq_len, limits.max_batch_size, limits.max_step_tokens) < 1:
        raise EngineFormatError(f"{MANIFEST_FILE}: limits must be at least 1", COPY_AGAIN)


def section_problem(program: Program, section: Section) -> str:
    """Why a section cannot run, or why an input or output of it does not fit its buffer; "" if nothing is wrong.

    The offsets of buffers are not checked, because steps are also verified before memory is planned."""
    if not 0 <= section.shared <= section.begin <= section.end <= len(program.steps):
        return f"steps {section.begin} to {section.end} are not in the program"
    buffers = {buffer.name: buffer for buffer in program.buffers}
    for name, array in (*section.inputs.items(), *section.outputs.items()):
        buffer = buffers.get(array.at)
        if array.dtype not in ("f32", "i32") or min(array.shape, default=1) < 1:
            return f"{name} has rows of {array.shape} {array.dtype}"
        if buffer is None and array.at not in _ARRAYS:
            return f"there is no buffer {array.at} for {name}"
        if buffer is not None and (buffer.dtype, prod(buffer.shape)) != (array.dtype, prod(array.shape)):
            return f"{name} has rows of {array.shape} {array.dtype}, buffer {array.at} of {buffer.shape} {buffer.dtype}"
    return ""


def _outside_arena(program: Program, section: Section) -> str:
    """A buffer of a section that lies outside the arena; "" if there is none, as must be after memory is planned."""
    offsets = {buffer.name: buffer.offset for buffer in program.buffers}
    for name, array in (*section.inputs.items(), *section.outputs.items()):
        if array.at in offsets and not 0 <= offsets[array.at] <= program.arena_bytes_per_token - array.row_bytes:
            return f"buffer {array.at} for {name} is not in the arena"
    return ""


def _check_group(group: KVGroup) -> None:
    """Raise KVLayoutError if this runtime does not support such a group."""
    if not 1 <= group.block_size <= MAX_BLOCK_SIZE:
        raise KVLayoutError(
            f"the engine keeps {group.block_size} tokens in a KV block, this runtime can keep 1 to {MAX_BLOCK_SIZE}",
            COPY_AGAIN,
        )
    if problem := "" if group.stored is None else group.stored.problem():
        raise KVLayoutError(f"the engine's KV cache {group.dtype!r} has {problem}", COPY_AGAIN)
    if group.stored is None and group.dtype not in KV_NUMBERS:
        raise KVLayoutError(
            f"the engine's KV cache is of type {group.dtype!r}, this runtime has {', '.join(KV_NUMBERS)}",
            "compile the model again with this version of icc",
        )
    paired = group.keeps in EVICTING
    if group.keeps not in POLICIES or group.size < (paired or group.keeps == "window") or (group.beside > 0) != paired:
        raise KVLayoutError(
            f"the engine's KV cache keeps {group.keeps!r} of size {group.size}, this runtime has {', '.join(POLICIES)}",
            "compile the model again with this version of icc",
        )
