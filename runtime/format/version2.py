"""Converts format version 2 to version 3. In version 2 an engine had one program, the inputs and outputs of its two
sections followed from their names, and token types were coded in the token ids."""

from __future__ import annotations

import msgspec

from .program import ASKED_ROWS, DRAFTS, LOGITS, Program, Section, SectionArray

_MISSING = msgspec.Raw(b"null")  # refused later, when the field is decoded


def manifest_as_3(facts: dict[str, msgspec.Raw]) -> bytes:
    """engine.json in format 3, given its fields: the engine's program is moved to `programs`."""
    entry = {
        "program": facts.pop("program_file", _MISSING),
        "weights": facts.pop("weights_file", _MISSING),
        "libraries": facts.pop("libraries", _MISSING),
    }
    if "embedding" in facts:
        facts["embedding"] = _with_coded_types(facts["embedding"])
    return msgspec.json.encode({**facts, "programs": {"main": entry}})


def _with_coded_types(embedding: msgspec.Raw) -> msgspec.Raw:
    """EmbeddingFacts with `coded_types`, which format 2 calls otherwise."""
    try:
        facts = msgspec.json.decode(embedding, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return embedding  # refused later, when it is decoded
    named = {"coded_types" if name == "token_types" else name: value for name, value in facts.items()}
    return msgspec.Raw(msgspec.json.encode(named))


def with_what_sections_take(program: Program) -> Program:
    """The program with the inputs and outputs of its sections, which followed from their names. Draft heads wrote to a
    separate array."""
    spec, found = program.speculation, list[Section]()
    for section in program.sections:
        if section.name == "medusa" and spec is not None:
            inputs = {ASKED_ROWS: SectionArray("i32", [], "logit_rows")}
            outputs = {DRAFTS: SectionArray("i32", [spec.heads, spec.ranks], DRAFTS)}
        else:
            inputs, outputs = {}, {LOGITS: SectionArray("f32", [program.vocab_size], LOGITS)}
        found.append(msgspec.structs.replace(section, inputs=inputs, outputs=outputs))
    return msgspec.structs.replace(program, sections=found)
