"""Checks that the options of a compile are valid: each by itself, for the target, and in combination."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..passes.registry import check_names
from ..runtime.format.exchange import MAX_RANKS as MAX_GPUS
from ..runtime.settings import settings
from ..runtime.system import LINUX
from .backends.cpu.isa import find_isas
from .choices import POOLINGS, STATE_DTYPES, TASKS
from .drafters import LAYERS
from .errors import UsageError
from .gates import parse_gates
from .kv_formats import AUTO, read_cache_option
from .quantization import GROUPS, QUANTIZATIONS, ROWS8, find_quantization, head_format
from .sizes import check_auto
from .targets import Target, find_target

if TYPE_CHECKING:
    from .options import CompileOptions

MAX_RANKS, MAX_STAGES = 64, 24  # on CPUs; stages of several ranks each, see stages.h


def check_options(options: CompileOptions) -> None:
    """Raise UsageError for the first option whose value does not exist, or which has no effect for the target or with
    another option. Also raises the errors of the functions that parse values."""
    _choice("--task", options.task, tuple(TASKS))
    find_quantization(options.quant)
    head_format(options.quant_head)
    _check_step_kernel(options)
    read_cache_option(options.kv_cache)
    _choice("--state-cache", options.state_cache, tuple(STATE_DTYPES))
    _check_policy(options)
    _check_isa(options)
    if options.tune and not find_target(options.target).is_here:
        raise UsageError(
            f"--tune measures this machine, and --target {options.target} is not only for it",
            "use --target native; for a GPU: icc tune ENGINE, on a host that has it",
        )
    _check_group(options)
    _check_rows8(options)
    if options.quant == "none":
        _check_unquantized(options)
    if options.device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", options.device):
        raise UsageError(f"--device {options.device!r} is unknown", "choose from: cpu, cuda, cuda:N")
    _check_task(options)
    check_auto(options.quant, options.size, options.bits)
    if options.quant == "auto":
        _check_auto(options)
    _check_kv_bits(options)
    _check_adapters(options)
    _check_ranks(options)
    parse_gates(options.gate)
    check_names(options.passes)
    if options.gate_text is not None and not options.gate:
        raise UsageError("--gate-text is for --gate", "add --gate ppl=2%, or leave --gate-text out")
    for name, found in settings(type(options)).items():
        value = getattr(options, name)
        if found.least is not None and value is not None and value < found.least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {found.least}, not {value}")


def _check_policy(options: CompileOptions) -> None:
    policy = options.eviction
    if policy is not None and policy.chooses:
        if find_target(options.target).backend != "cpu":
            raise UsageError(
                f"--kv-policy {policy}: there are no kernels for --target {options.target}",
                "use --target cpu, or --kv-policy streaming",
            )
        if options.spec != "none":
            raise UsageError(f"--kv-policy {policy}: what guesses evict cannot be taken back", "leave --spec out")
    if policy is not None and options.task != "generate":
        raise UsageError(f"--kv-policy is for texts that go on, and --task {options.task} reads whole ones")


def _check_isa(options: CompileOptions) -> None:
    if options.isa is None and options.os is None:
        return
    target, option = find_target(options.target), "--os" if options.isa is None else "--isa"
    if target.backend != "cpu" or target.is_here:
        why = "is for this machine's CPU" if target.is_here else "is for a GPU"
        given = f"{option} {options.isa or options.os}: --target {options.target} {why}"
        raise UsageError(given, f"use --target cpu, or leave {option} out")
    isas = find_isas(target.arch, options.isa, options.os)
    if options.ranks > 1 and any(isa.system != LINUX for isa in isas):
        raise UsageError(
            f"--os {options.os}: several ranks run only on Linux", "compile for one rank, or leave --os out"
        )


def _check_unquantized(options: CompileOptions) -> None:
    head = options.quant_head not in ("none", type(options).quant_head)
    for option, given, does in (
        ("--rotate", options.rotate, "evens out what is rounded, and --quant none rounds nothing"),
        ("--keep", bool(options.keep), "leaves layers unquantized, and --quant none quantizes none"),
        (f"--quant-head {options.quant_head}", head, "is for models that are quantized, not --quant none"),
    ):
        if given:
            raise UsageError(f"{option} {does}", f"give a --quant, or leave {option.partition(' ')[0]} out")


def _check_group(options: CompileOptions) -> None:
    if options.group_size is None:
        return
    if options.group_size not in GROUPS:
        sizes = ", ".join(map(str, reversed(GROUPS)))
        raise UsageError(f"--group-size {options.group_size}: there are no kernels for it", f"choose from: {sizes}")
    chosen = find_quantization(options.quant)
    if chosen is None or not chosen.grouped:
        grouped = ", ".join(name for name, found in QUANTIZATIONS.items() if found is not None and found.grouped)
        raise UsageError(f"--group-size is not used by --quant {options.quant}", f"choose from: {grouped}")


def _check_rows8(options: CompileOptions) -> None:
    chosen = find_quantization(options.quant)
    if chosen is not None and chosen.format == ROWS8 and find_target(options.target).backend == "hip":
        raise UsageError(
            f"--quant {options.quant}: there are no products with rows of 8 bits for --target {options.target}",
            f"use --quant {options.quant.removesuffix('a8')}",
        )


def _check_auto(options: CompileOptions) -> None:
    for name, default in (("quant_head", "int8"), ("group_size", None), ("device", "cpu")):
        if getattr(options, name) != default:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} has no meaning with --quant auto", f"leave {option} out")


def _check_kv_bits(options: CompileOptions) -> None:
    if options.kv_bits is None:
        return
    if not 0 < options.kv_bits <= 32:
        raise UsageError(f"--kv-bits {options.kv_bits:g} is no number of bits", "give 2.6 to 16")
    if options.kv_cache != AUTO:
        raise UsageError(
            f"--kv-cache {options.kv_cache} and --kv-bits both say what the KV cache holds", "leave one of them out"
        )
    if options.task != "generate":
        raise UsageError(f"--kv-bits is for texts that go on, and --task {options.task} reads whole ones")


def _check_ranks(options: CompileOptions) -> None:
    if options.sequence_parallel:
        _check_rows(options)
    if options.ranks == 1:
        return
    _check_stages(options)
    both = [n for n in (options.tensor_parallel, options.expert_parallel) if n is not None and n > 1]
    if len(set(both)) > 1:
        raise UsageError(
            f"--tensor-parallel {options.tensor_parallel} and --expert-parallel {options.expert_parallel} differ, "
            "and are of the same ranks",
            "give both the same number",
        )
    target = find_target(options.target)
    if options.ranks > (most := most_ranks(target)):
        raise UsageError(
            f"{options.ranks} ranks are more than the {most} that --target {options.target} can have",
            f"compile for {most} ranks or fewer",
        )
    if options.tune:
        raise UsageError("--tune does not work with several ranks", "leave it out, or compile for one rank")
    if target.backend != "cpu" and options.spec.partition(":")[0] in (*LAYERS, "medusa", "layer-skip"):
        hint = "leave it out, or compile for one rank, or for CPUs"
        raise UsageError(f"--spec {options.spec} does not work with several ranks of a GPU", hint)
    if target.backend != "cpu" and not target.link:
        raise UsageError(
            f"several ranks: nothing is known of links between GPUs of --target {options.target}",
            "compile for one rank, or give another --target",
        )


def most_ranks(target: Target) -> int:
    """The most ranks that an engine of a target may have."""
    return MAX_RANKS if target.backend == "cpu" else MAX_GPUS


def _check_rows(options: CompileOptions) -> None:
    if (options.tensor_parallel or 1) == 1:
        raise UsageError("--sequence-parallel divides what ranks of --tensor-parallel do alike", "give both")


def _check_step_kernel(options: CompileOptions) -> None:
    if options.step_kernel and find_target(options.target).backend != "cuda":
        raise UsageError(f"--step-kernel is for NVIDIA GPUs: --target {options.target} is none", "leave it out")


def _check_stages(options: CompileOptions) -> None:
    if (options.pipeline_parallel or 1) == 1:
        return
    if find_target(options.target).backend != "cpu":
        raise UsageError(
            f"--pipeline-parallel is for CPUs: there are no kernels of it for --target {options.target}",
            "use --target cpu, or leave --pipeline-parallel out",
        )
    if (options.pipeline_parallel or 1) > MAX_STAGES and options.ranks > (options.pipeline_parallel or 1):
        said = f"--pipeline-parallel {options.pipeline_parallel}: at most {MAX_STAGES} stages of several ranks"
        raise UsageError(said, "give fewer stages, of more ranks each")
    given = {
        "--sequence-parallel": options.sequence_parallel,
        f"--spec {options.spec}": options.spec.partition(":")[0] in (*LAYERS, "medusa", "layer-skip"),
        f"--kv-policy {options.eviction}": options.eviction is not None and options.eviction.chooses,
    }
    for option, is_given in given.items():
        if is_given:
            raise UsageError(f"{option} does not work with --pipeline-parallel", "leave one of them out")


def _check_adapters(options: CompileOptions) -> None:
    if options.adapter_slots is None:
        return
    if options.rotate:
        raise UsageError("--adapters and --rotate: adapters were trained for channels as they were", "leave one out")


def _check_task(options: CompileOptions) -> None:
    if options.pooling is not None:
        _choice("--pooling", options.pooling, tuple(POOLINGS))
        if options.task != "embed":
            raise UsageError("--pooling is for engines that embed", "add --task embed")
    if options.task != "generate" and options.prefix:
        raise UsageError(f"--prefix: --task {options.task} reads whole texts, and keeps none", "leave --prefix out")
    if options.task != "generate" and (options.schema or options.grammar):
        raise UsageError(f"--schema and --grammar are for answers, and --task {options.task} gives none")
    if options.eviction is not None and options.eviction.chooses and options.prefix:
        raise UsageError(
            f"--prefix: --kv-policy {options.eviction} drops tokens depending on later ones", "leave one of them out"
        )
    if options.task != "generate" and options.gate:
        raise UsageError(f"--gate compares predictions, and --task {options.task} makes none", "leave --gate out")
    if options.task != "generate" and (options.spec != "none" or options.spec_guesses is not None):
        raise UsageError(f"--task {options.task} generates no tokens that --spec could guess", "leave --spec out")


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{option} {value!r} is unknown", f"choose from: {', '.join(allowed)}")
