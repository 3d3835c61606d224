"""Builds engine.json from the results of a compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ... import __version__
from ...runtime.format.manifest import (
    FORMAT_VERSION,
    KERNEL_ABI,
    MAIN,
    EmbeddingFacts,
    EvictionFacts,
    Limits,
    Manifest,
    ModelFacts,
    ProgramEntry,
    QuantFacts,
    SamplingDefaults,
    rank_program,
    weights_file,
)
from ..backends.base import Built
from ..frontend.source.facts import TYPES
from ..frontend.source.identify import read_object
from ..frontend.source.pair_template import texts_around
from ..frontend.source.pooling import Pooling
from ..frontend.source.scoring import read_scoring
from ..genai import genai_config, genai_generation
from ..generation import read_generation, sampling_defaults
from ..graph.graph import Graph
from ..graph.tensor_types import type_of
from ..options import CompileOptions
from ..program.lower import Lowered
from ..targets import Target, find_target
from .tail import write_tail


def make_manifest(
    graph: Graph,
    lowered: Lowered,
    quantization: QuantFacts,
    options: CompileOptions,
    target: Target,
    built: Built,
    tokenizer: str | None,
    embedding: EmbeddingFacts | None = None,
    canaries_file: str | None = None,
) -> Manifest:
    """The manifest without its file table. tokenizer, canaries_file: their paths in the engine, None if it has none.
    embedding: None for an engine that generates."""
    config, generation = _stated(options.model)
    info = graph.info
    model = ModelFacts(
        architecture=info.architecture,
        vocab_size=info.vocab_size if embedding else lowered.program.vocab_size,
        hidden_size=info.hidden_size,
        num_layers=info.num_layers,
        num_parameters=info.num_parameters,
        max_seq_len=graph.max_seq_len,
        bos_token_id=_first(_token_ids(config, generation, "bos_token_id")),
        eos_token_ids=end_token_ids(options.model, config, generation),
        pad_token_id=_first(_token_ids(config, generation, "pad_token_id")),
    )
    own = kernel_manifest(target, built, make_limits(graph, options), model, quantization)
    return msgspec.structs.replace(
        own,
        programs={
            rank_program(rank): msgspec.structs.replace(
                own.main,
                weights=weights_file(rank),
                rank=rank,
                is_stage=graph.stages > 1,
                parts=graph.parts if graph.stages > 1 else 1,
            )
            for rank in range(graph.ranks)
        },
        sampling=sampling_defaults(generation),
        tokenizer_dir=tokenizer,
        embedding=embedding,
        eviction=eviction_facts(options),
        canaries_file=canaries_file,
    )


def kernel_manifest(
    target: Target, built: Built, limits: Limits, model: ModelFacts, quantization: QuantFacts
) -> Manifest:
    """The least manifest that runs the kernels: greedy decoding, no tokenizer."""
    return Manifest(
        format_version=FORMAT_VERSION,
        icc_version=__version__,
        target=target.name,
        backend=target.backend,
        model=model,
        quantization=quantization,
        limits=limits,
        sampling=SamplingDefaults(),
        programs={MAIN: ProgramEntry("program.json", weights_file(), list(built.libraries))},
        tokenizer_dir=None,
        files={},
        gpu=built.gpu,
        kernel_abi=KERNEL_ABI[target.backend],
    )


def make_limits(graph: Graph, options: CompileOptions) -> Limits:
    """The limits that the engine is compiled for. If tokens see later ones, a step can hold the longest sequence.

    On CPUs a step holds at most the tokens of one sequence; on GPUs those of several.
    """
    target, longest = find_target(options.target), graph.max_seq_len
    sequences, tokens = default_steps(target, graph.info.num_parameters)
    sequences = options.max_batch_size or sequences
    tokens = options.max_step_tokens or tokens
    tokens = min(tokens, longest if target.backend == "cpu" else longest * sequences)
    return Limits(longest, sequences, max(tokens, longest) if graph.looks_ahead else tokens)


def default_steps(target: Target, parameters: int) -> tuple[int, int]:
    """Default sequences and tokens of a step: enough that a GPU is bound by arithmetic and not by reading weights; half
    as many if 16-bit weights would leave the KV cache less than half of the memory. Modelled, not measured.
    """
    if target.backend == "cpu":
        return 16, 512
    sequences = 256 if target.memory_gib >= 64 else 128 if target.memory_gib >= 40 else 64
    crowded = 2 * parameters > target.memory_gib * 2**30 / 2
    return (sequences // 2 if crowded else sequences), 32 * sequences // (2 if crowded else 1)


def eviction_facts(options: CompileOptions) -> EvictionFacts | None:
    """What --kv-policy evicts; None if it evicts nothing."""
    policy = options.eviction
    return None if policy is None else EvictionFacts(str(policy), policy.tokens, policy.loses)


def embedding_facts(
    stage: Path, graph: Graph, options: CompileOptions, pooling: Pooling | None
) -> EmbeddingFacts | None:
    """How the engine turns a prompt's hidden states into its result, with the files for it written; None for an engine
    that generates."""
    [width] = type_of(graph.output).shape
    if options.task == "rerank":
        kind, scoring = "cls" if graph.picked == "first" else "last", read_scoring(options.model)
        around = list(texts_around(options.model, scoring.prompt)) if scoring.words else []
        types = TYPES if graph.input(TYPES) else ""
        return EmbeddingFacts(kind, False, width, scores=scoring.function, types_input=types, around=around)
    if pooling is None:
        return None
    kinds = pooling.settled(graph.looks_ahead)
    behind = pooling.layers[len(pooling.dense(graph.looks_ahead)) :]
    tail, dimension = write_tail(stage, behind, width * len(kinds))
    return EmbeddingFacts(
        kinds[0],
        pooling.normalize,
        dimension,
        pooled=kinds == ("mean",) and pooling.in_graph(graph.looks_ahead) and graph.looks_ahead,
        also=list(kinds[1:]),
        tail=tail,
        rows=width if dimension != width else 0,
        prompts=pooling.prompts,
        default_prompt=pooling.default_prompt,
        skips_prompt=not pooling.prompted,
    )


def read_bos(model: Path) -> int | None:
    """The token that begins a text; None if the checkpoint names none."""
    return _first(_token_ids(*_stated(model), "bos_token_id"))


def _stated(model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json, or their equivalents beside an ONNX model."""
    config, generation = _read_json(model / "config.json"), read_generation(model)
    return config or genai_config(model), generation or ({} if config else genai_generation(model))


def end_token_ids(model: Path, config: dict[str, Any], generation: dict[str, Any]) -> list[int]:
    """The tokens that end a text: those of generation_config.json, or of config.json, and the tokenizer's EOS token, by
    its id in tokenizer.json. Chat models often name their end of turn only there."""
    ids = _token_ids(config, generation, "eos_token_id")
    name = _read_json(model / "tokenizer_config.json").get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    if name is None or not (model / "tokenizer.json").is_file():
        return ids
    added = _read_json(model / "tokenizer.json").get("added_tokens") or ()
    return list(dict.fromkeys([*ids, *(token["id"] for token in added if token["content"] == name)]))


def _token_ids(config: dict[str, Any], generation: dict[str, Any], key: str) -> list[int]:
    for source in (generation, config, config.get("text_config") or {}):
        value = source.get(key)
        if value is not None:
            return [int(v) for v in value] if isinstance(value, list) else [int(value)]
    return []


def _first(values: list[int]) -> int | None:
    return values[0] if values else None


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
