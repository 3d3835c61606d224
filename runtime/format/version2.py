"""Format version 2, as version 3 has it: an engine had one program, two sections of it had names that stood for
what they were given and gave, and the types of tokens came with their ids."""

from __future__ import annotations

import msgspec

from .program import ASKED_ROWS, DRAFTS, LOGITS, Program, Section, SectionArray

_MISSING = msgspec.Raw(b"null")  # is refused where the field must be


def manifest_as_3(facts: dict[str, msgspec.Raw]) -> bytes:
    """engine.json, by its fields, with the engine's program under its name."""
    entry = {
        "program": facts.pop("program_file", _MISSING),
        "weights": facts.pop("weights_file", _MISSING),
        "libraries": facts.pop("libraries", _MISSING),
    }
    if "embedding" in facts:
        facts["embedding"] = _with_coded_types(facts["embedding"])
    return msgspec.json.encode({**facts, "programs": {"main": entry}})


def _with_coded_types(embedding: msgspec.Raw) -> msgspec.Raw:
    """EmbeddingFacts with today's name for how many types are coded in ids."""
    try:
        facts = msgspec.json.decode(embedding, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return embedding  # is refused as it is
    named = {"coded_types" if name == "token_types" else name: value for name, value in facts.items()}
    return msgspec.Raw(msgspec.json.encode(named))


def with_what_sections_take(program: Program) -> Program:
    """The program with what its sections are given and give: they were known by their names. Draft heads wrote into an
    array of their own."""
    spec, found = program.speculation, list[Section]()
    for section in program.sections:
        if section.name == "medusa" and spec is not None:
            inputs = {ASKED_ROWS: SectionArray("i32", [], "logit_rows")}
            outputs = {DRAFTS: SectionArray("i32", [spec.heads, spec.ranks], DRAFTS)}
        else:
            inputs, outputs = {}, {LOGITS: SectionArray("f32", [program.vocab_size], LOGITS)}
        found.append(msgspec.structs.replace(section, inputs=inputs, outputs=outputs))
    return msgspec.structs.replace(program, sections=found)
