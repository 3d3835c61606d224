"""Makes the KeptPrompts of an engine process."""

from __future__ import annotations

from pathlib import Path

from ...llm import LLM
from ...prefixes.blocks import KVBlocks, digest_of, in_reach
from ...prefixes.kept import KeptPrompts
from ...prefixes.store import PromptStore
from .prompt_folder import PromptFolder


def kept_prompts(llm: LLM, folder: PromptFolder | None) -> KeptPrompts:
    """The KeptPrompts of a loaded engine. folder: None keeps prompts only in memory."""
    reach, blocks, store = in_reach(llm.executor), None, None
    if folder is not None and reach is not None:
        blocks = KVBlocks(digest_of(llm.manifest), reach)
        store = PromptStore(Path(folder.path), blocks.identity, folder.most_bytes)
    return KeptPrompts(lambda: llm.loop.scheduler.kv, llm.manifest.limits.max_seq_len, blocks, store)
