"""Prompts that an engine is compiled with: those of --prefix and of an earlier engine, and their KV."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from pathlib import Path

from ..runtime.format.manifest import Limits, Manifest
from ..runtime.format.prompts import CompiledPrompt, CompiledPrompts
from . import measure
from .engine import directory as writer
from .engine.earlier import EarlierEngine
from .errors import UsageError
from .program.lower import Lowered
from .progress import Reporter
from .prompt_files import PromptTokens
from .targets import Target


def compiled_prompts(
    prompts: Sequence[PromptTokens], kept: EarlierEngine | None, lowered: Lowered, limits: Limits, reporter: Reporter
) -> list[CompiledPrompt]:
    """The prompts whose KV the engine is to hold: those of `kept` if it is not None, and those of --prefix. A delta
    without the latter has none of its own. UsageError for a prompt that does not fill a block of the engine's cache, or
    does not fit a sequence."""
    multiple = lcm(*(group.block_size for group in lowered.program.kv.groups))
    found = [] if kept is None else _without([list(prompt.tokens) for prompt in prompts], kept.prompts())
    if kept is not None and kept.as_base and found and not prompts:
        reporter.warn(
            f"the KV of the prompts in {kept.engine.path} is not that of these weights: the delta computes it whenever "
            "it is loaded, unless the compile is given --prefix again"
        )
        return []
    for prompt in prompts:
        length = len(prompt.tokens) // multiple * multiple
        if not length:
            raise UsageError(
                f"--prefix: the prompts that begin with {prompt.source} have only {len(prompt.tokens)} tokens in "
                f"common, and a block of the KV cache holds {multiple}",
                "leave it out, or make it longer",
            )
        if len(prompt.tokens) + 1 >= limits.max_seq_len:
            raise UsageError(
                f"--prefix: {prompt.source} has {len(prompt.tokens)} tokens, and the longest sequence "
                f"{limits.max_seq_len}",
                "raise --max-seq-len, or shorten it",
            )
        if prompt.warning:
            reporter.warn(prompt.warning)
        found.append(CompiledPrompt(prompt.source, prompt.kind, list(prompt.tokens), length))
    return found


def _without(given: Sequence[list[int]], prompts: Sequence[CompiledPrompt]) -> list[CompiledPrompt]:
    """The prompts whose tokens are not among the given ones."""
    return [prompt for prompt in prompts if prompt.tokens not in given]


def write_prompts(
    manifest: Manifest, prompts: Sequence[CompiledPrompt], stage: Path, target: Target, reporter: Reporter
) -> Manifest:
    """Compute and write the KV of prompts, if the engine can run on this machine; else the engine does so when it is
    loaded."""
    if not prompts:
        return manifest
    with reporter.stage("prompts"):
        found = measure.compute_prompts(stage, target, prompts)
    if found is None:
        found = CompiledPrompts(list(prompts))
        reporter.warn(
            f"--prefix: an engine for {target.name} does not run here, or has several ranks: it "
            "computes these prompts whenever it is loaded, before its first request"
        )
    return writer.write_prompts(stage, manifest, found)
