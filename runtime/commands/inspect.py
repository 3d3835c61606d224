"""`inspect`: what is inside an engine, without loading it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import msgspec

from ..format.decoding import decode
from ..format.files import EngineFiles
from ..format.forms import read_forms
from ..format.isa import cpu_flags, runs_here
from ..format.kv import KVGroup, KVLayout, KVMemory
from ..format.load import read_manifest, read_targets
from ..format.manifest import Limits, Manifest
from ..format.open_container import open_container
from ..format.program import Program
from ..format.programs import read_program
from ..format.prompts import PROMPTS_FILE, CompiledPrompts
from ..kv.policy import EVICTING

BESIDE = {"streaming": "in front", "h2o": "the last", "snapkv": "the last"}


def describe_engine(path: str | os.PathLike[str]) -> dict[str, object]:
    """Facts about an engine as plain JSON values, per target if it has several; sizes in bytes. The files are not
    compared with their hashes."""
    root = Path(path)
    if (targets := read_targets(root)) is not None:
        sizes = open_container(root).sizes()
        uses = Counter(place for entry in targets.targets.values() for place in {*entry.files.values()})
        return {
            "engine": str(root),
            "targets": {target: _of_one(root / target) for target in targets.targets},
            "bytes_shared": sum(sizes[place] for place, times in uses.items() if times > 1),
            "total_bytes": sum(sizes.values()),
        }
    return _of_one(root)


def _of_one(root: Path) -> dict[str, object]:
    manifest = read_manifest(root)
    files = EngineFiles(open_container(root), manifest.files, verify=False, base=manifest.base)
    program = read_program(manifest, files)
    model, limits = manifest.model, manifest.limits
    flags = cpu_flags()
    ops = Counter(program.kernels[step.kernel] for step in program.steps)
    weights: Counter[str] = Counter()
    for weight in program.stored.values():
        weights[weight.format] += weight.nbytes
    return {
        "engine": str(root),
        "icc_version": manifest.icc_version,
        **({} if manifest.base is None else {"delta_of": manifest.base.path}),
        "target": manifest.target,
        "architecture": model.architecture,
        "parameters": model.num_parameters,
        "layers": model.num_layers,
        "vocab_size": model.vocab_size,
        **_embedding_facts(manifest),
        "quantization": manifest.quantization.method,
        "bits_per_weight": manifest.quantization.bits_per_weight,
        "kept": list(manifest.quantization.kept),
        **({} if manifest.gate is None else {"gate": msgspec.to_builtins(manifest.gate)}),
        "limits": {
            "max_seq_len": limits.max_seq_len,
            "max_batch_size": limits.max_batch_size,
            "max_step_tokens": limits.max_step_tokens,
        },
        **_prompt_facts(files, manifest),
        **_form_facts(files, manifest),
        **({} if manifest.eviction is None else {"eviction": msgspec.to_builtins(manifest.eviction)}),
        "kv_cache": _kv_facts(program.kv, limits),
        "arena_bytes": program.arena_bytes_per_token * limits.max_step_tokens,
        "weights_bytes": dict(sorted(weights.items())),
        "steps": dict(sorted(ops.items())),
        "kernels": len(program.kernels),
        **({"programs": list(manifest.programs)} if len(manifest.programs) > 1 else {}),
        **({"ranks": manifest.ranks} if manifest.ranks > 1 else {}),
        **({"sections": [section.name for section in program.sections]} if program.sections else {}),
        "libraries": [
            {"isa": library.isa, "system": library.system, "path": library.path, "runs_here": runs_here(library, flags)}
            for library in manifest.main.libraries
        ],
        **_gpu_facts(manifest, program),
        "total_bytes": sum(entry.size for entry in manifest.files.values()),
    }


def _kv_facts(kv: KVLayout, limits: Limits) -> dict[str, object]:
    """The bytes of the KV cache, in all and for each KV group."""
    one, batch = (kv.blocks_needed(limits, sequences) for sequences in (1, limits.max_batch_size))
    groups = [
        {
            "keeps": _kept(group),
            "layers": len(group.layers),
            "dtype": group.dtype,
            "block_size": group.block_size,
            "bytes_per_token": group.bytes_per_token(),
            **({"bytes_per_state": group.block_bytes()} if group.holds_states else {}),
            "bytes_one_sequence": least * group.block_bytes(),
            "bytes_full_batch": most * group.block_bytes(),
        }
        for group, least, most in zip(kv.groups, one, batch, strict=True)
    ]
    return {
        "bytes_per_token": kv.bytes_per_token(),
        "bytes_full_batch": KVMemory(kv, batch).nbytes,
        "groups": groups,
    }


def _kept(group: KVGroup) -> str:
    """Which tokens of a sequence a group keeps, as text."""
    if group.holds_states:
        return f"the state, and {group.size} checkpoints per sequence"
    if group.keeps in EVICTING:
        return f"{group.keeps} of {group.size}, {group.beside} {BESIDE[group.keeps]} (lossy)"
    return group.keeps if group.keeps == "all" else f"{group.keeps} of {group.size}"


def _prompt_facts(files: EngineFiles, manifest: Manifest) -> dict[str, object]:
    """The prompts that the engine was compiled with; {} if there are none."""
    if PROMPTS_FILE not in manifest.files:
        return {}
    found = decode(files.read(PROMPTS_FILE), PROMPTS_FILE, CompiledPrompts)
    of_base = manifest.base is not None and PROMPTS_FILE in manifest.base.shared  # their KV is of the base's weights
    rows = [
        {
            "file": one.source,
            "is": one.kind,
            "tokens": len(one.tokens),
            "kept_tokens": one.length,
            "kv_bytes": manifest.files[one.file].size if one.file and not of_base else "computed when loaded",
        }
        for one in found.prompts
    ]
    return {"prompts": rows, **({"prompts_computed_by": found.isa} if found.isa and not of_base else {})}


def _form_facts(files: EngineFiles, manifest: Manifest) -> dict[str, object]:
    """The schemas and grammars that the engine was compiled with; {} if there are none."""
    forms = read_forms(files, manifest)
    rows = [{"file": one.source, "is": one.kind, "bytes": len(one.lowered)} for one in forms]
    return {"grammars": rows} if rows else {}


def _embedding_facts(manifest: Manifest) -> dict[str, object]:
    """The embedding engine's task, and how its vectors are made."""
    found = manifest.embedding
    if found is None:
        return {"task": "generate"}
    facts = {"pooling": found.pooling, "normalize": found.normalize, "dimension": found.dimension}
    return {"task": "embed", "embedding": facts}


def _gpu_facts(manifest: Manifest, program: Program) -> dict[str, object]:
    """What a GPU engine needs, and the resources of each of its kernel objects; {} for a CPU engine."""
    if manifest.gpu is None or program.plan is None:
        return {}
    return {
        "gpu": {
            "arch": manifest.gpu.arch,
            "driver": manifest.gpu.driver_version,
            "deterministic": manifest.gpu.deterministic,
        },
        "phases": [f"{'decode' if p.decode else 'mixed'} up to {p.max_tokens}" for p in program.plan.phases],
        "scratch_bytes": program.plan.scratch_bytes,
        "objects": [
            {**row, "kernels": " ".join(row["kernels"]), "faults": row["faults"] or "none"}  # type: ignore[arg-type]
            for row in program.plan.resources()
        ],
    }
