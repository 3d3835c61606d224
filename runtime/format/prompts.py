"""prompts.json: the prompts that an engine was compiled with, and where the KV of each lies."""

from __future__ import annotations

from typing import Literal

import msgspec

PROMPTS_FILE = "prompts.json"  # an engine without one has none
PROMPTS_DIR = "prompts"


class CompiledPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A beginning of prompts. source: the name of the file that it was read from, which is a system message, messages,
    or a text as it is. tokens: its token ids; the KV of the first `length` of them is kept.

    file: the bytes of the KV blocks whose numbers are `numbers[group]`, one after the other, each with all layers of
    its group; "" where they are computed when the engine is loaded.
    """

    source: str
    kind: Literal["system", "messages", "text"]
    tokens: list[int]
    length: int
    file: str = ""
    numbers: list[list[int]] = []


class CompiledPrompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """identity: digest (hex) of what computed the blocks and how they are laid out, see prefixes/blocks.py; isa: the
    level of the library that did. Where an engine is loaded that has another, the blocks are computed anew."""

    prompts: list[CompiledPrompt]
    identity: str = ""
    isa: str = ""
