"""Compiled: the prompts that an engine was compiled with, read from its files."""

from __future__ import annotations

from ..format.decoding import decode
from ..format.load import Engine
from ..format.manifest import Manifest
from ..format.prompts import PROMPTS_FILE, CompiledPrompt, CompiledPrompts
from ..kv.policy import kept_blocks


class PromptsOfEngine:
    """The compiled prompts of an opened engine."""

    def __init__(self, engine: Engine, found: CompiledPrompts) -> None:
        self._engine, self._found = engine, found

    @classmethod
    def of(cls, engine: Engine) -> PromptsOfEngine | None:
        """The prompts of an engine; None if it has none."""
        if PROMPTS_FILE not in engine.manifest.files:
            return None
        return cls(engine, decode(engine.files.read(PROMPTS_FILE), PROMPTS_FILE, CompiledPrompts))

    @property
    def manifest(self) -> Manifest:
        """The engine's manifest."""
        return self._engine.manifest

    @property
    def prompts(self) -> list[CompiledPrompt]:
        """All compiled prompts."""
        return self._found.prompts

    def room(self) -> list[int]:
        """How many blocks of each KV group all prompts take."""
        groups = self._engine.program.kv.groups
        return [
            sum(len(some) for one in self.prompts for some in kept_blocks(group.policy, group.block_size, one.length))
            for group in groups
        ]

    def fits(self, identity: bytes) -> bool:
        """Whether a cache of this identity, filled by this machine's kernels, would hold the same blocks."""
        library = self._engine.library
        return self._found.identity == identity.hex() and library is not None and library.title == self._found.isa

    def content(self, prompt: CompiledPrompt) -> memoryview:
        """The bytes of the blocks of a prompt that has a file."""
        return memoryview(self._engine.files.read(prompt.file))
