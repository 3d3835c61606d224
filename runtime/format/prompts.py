"""prompts.json: the prompts that an engine was compiled with, and the places of their KV."""

from __future__ import annotations

from typing import Literal

import msgspec

PROMPTS_FILE = "prompts.json"  # an engine without such prompts does not have this file
PROMPTS_DIR = "prompts"


class CompiledPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A prefix of prompts. source: the name of the file that it was read from; kind: whether that is a system message,
    messages, or a plain text. tokens: its token ids; the KV of the first `length` of them is stored.

    file: the file with the bytes of the KV blocks, in the order of `numbers[group]` (their block numbers), each with
    all layers of its group; "" if they are computed when the engine is loaded.
    """

    source: str
    kind: Literal["system", "messages", "text"]
    tokens: list[int]
    length: int
    file: str = ""
    numbers: list[list[int]] = []


class CompiledPrompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All compiled prompts. identity: digest (hex) of the code that computed the blocks and of their layout, see
    prefixes/blocks.py. isa: the level of the library that computed them; if another library is loaded, they are
    computed again."""

    prompts: list[CompiledPrompt]
    identity: str = ""
    isa: str = ""
