"""Checks of a compile before anything heavy is imported, so that a mistake is reported at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from ..runtime.errors import MissingExtraError, install
from .backends.cpu.isa import find_isas
from .backends.cxx import find_compiler, find_zig
from .calibration import check_text
from .engine.output import check_file, check_output
from .errors import CheckpointError, UsageError
from .frontend.source import hub
from .frontend.source.identify import FoundModel, find_checkpoint, onnx_files
from .frontend.source.lengths import check_length
from .frontend.source.pooling import read_pooling
from .frontend.source.refuse import check_config, check_head, check_scores
from .frontend.source.shards import weight_files
from .frontend.source.tokenizer_files import TOKENIZER, other_tokenizer
from .generation import GENERATION_CONFIG, read_generation, unused_settings
from .options import CompileOptions
from .prompt_files import FormFile, PromptFile, read_form_file, read_prompt_file
from .quantization import QUANTIZATIONS, find_quantization
from .speculate.choice import SpecChoice
from .targets import Target, find_target

_NEEDED = ("torch", "transformers", "safetensors", "jinja2")


def tokenizer_file(folder: Path) -> Path | None:
    """The tokenizer.json of a directory; None if it has none."""
    file = folder / TOKENIZER
    return file if file.is_file() else None


@dataclass(frozen=True)
class CompileRequest:
    """A compile that has passed the first checks: its options, with the model as a local directory or file, its target
    and drafter, warnings for the user, the prompts of --prefix, and the forms of --schema and --grammar."""

    options: CompileOptions
    target: Target
    choice: SpecChoice | None
    warnings: tuple[str, ...] = ()
    prompts: tuple[PromptFile, ...] = ()
    forms: tuple[FormFile, ...] = ()


def check(options: CompileOptions, has_other: bool = False) -> CompileRequest:
    """Check the options of a compile; a model from the hub is downloaded. IccError says what is wrong. has_other: if
    the model has no tokenizer, the engine gets that of another engine.

    Checks that need no network come first, then config.json, then the files that the compile reads.
    """
    target, choice = find_target(options.target), SpecChoice.parse(options.spec)
    if lacking := lacking_module():
        raise MissingExtraError(f"compiling needs {lacking}, which is not installed", install("compile"))
    prompts = tuple(map(read_prompt_file, options.prefix))
    forms = (
        *(read_form_file(path, "schema") for path in options.schema),
        *(read_form_file(path, "grammar") for path in options.grammar),
    )
    _check_places(options, target, choice)
    found = find_model(options.model)
    check_found(found, options)
    model = hub.fetch(options.model) if hub.is_hub_name(options.model) else found.path
    options = replace(options, model=model)
    files = onnx_files(model) if found.is_onnx else model
    has_tokenizer = found.is_gguf or (files / TOKENIZER).is_file()
    has_tokenizer |= not found.is_file and bool(other_tokenizer(files))  # from which a tokenizer.json is made
    generation = {} if found.is_gguf else read_generation(files)
    if not found.is_file:
        weight_files(model)
        if options.task == "embed":
            read_pooling(model, options.pooling)
    for text in (options.calib, options.gate_text):
        if text is not None:
            check_text(text, has_tokenizer)
    if options.gate and not has_tokenizer:
        raise UsageError("--gate reads a text, and the model has no tokenizer.json", "leave --gate out")
    warnings = (*(() if has_tokenizer or has_other else _warnings(files)), *_costs(options))
    if options.task == "generate" and (unused := unused_settings(generation)):
        warnings += (f"{GENERATION_CONFIG} asks for {', '.join(unused)}, which an engine does not take from there",)
    if (prompts or forms) and not has_tokenizer:
        option = (*prompts, *forms)[0].option
        raise UsageError(f"{option} needs a tokenizer, and the model has no {TOKENIZER}", "leave it out")
    return CompileRequest(options, target, choice, warnings, prompts, forms)


def check_export(source: Path, output: Path, force: bool) -> Path:
    """The model or text file that `icc export` is to write to `output`; a model from the hub is downloaded.
    MissingExtraError if onnx, or a package that tracing needs, is not installed."""
    if find_spec("onnx") is None:
        raise MissingExtraError("this needs onnx, which is not installed", install("onnx"))
    if lacking := lacking_module():
        raise MissingExtraError(f"tracing needs {lacking}, which is not installed", install("compile"))
    check_file(output, force)
    if hub.is_hub_name(source):
        return hub.fetch(source)
    return source


def lacking_module() -> str:
    """A library of the extra `compile` that is not installed; "" if all are."""
    return next((name for name in _NEEDED if find_spec(name) is None), "")


def find_model(model: Path) -> FoundModel:
    """The checkpoint that MODEL names: local, or on the hub, from where only config.json is downloaded."""
    return find_checkpoint(hub.fetch_config(model) if hub.is_hub_name(model) else model)


def check_found(found: FoundModel, options: CompileOptions) -> None:
    """Raise the error that config.json, or the header of a GGUF file, gives for a compile with these options;
    MissingExtraError for an ONNX file if onnx is not installed."""
    policy = options.eviction
    check_length(found.config, options.max_seq_len, policy is not None and policy.endless)
    if found.is_onnx and find_spec("onnx") is None:
        raise MissingExtraError(f"{found.path} needs the package onnx, which is not installed", install("onnx"))
    if found.is_file:
        return
    check_config(found.path, found.config, options.task)
    if options.task == "generate":
        check_head(found.path, found.config)
    elif options.task == "rerank":
        check_scores(found.path, found.config)


def _check_places(options: CompileOptions, target: Target, choice: SpecChoice | None) -> None:
    """Check the files and directories of the options besides the model, and the C++ compiler."""
    if choice is not None and choice.is_layer:
        name = f"--spec {choice.drafter}"
        if options.adapter_slots is not None:
            raise UsageError(f"{name} does not work with --adapters", "leave one of them out")
        if options.rotate:
            raise UsageError(f"{name} does not work with --rotate, which turns the hidden states that the layer reads")
    heads = choice.heads if choice else None
    if choice is not None and choice.path is not None and not choice.path.is_dir():
        hint = "train heads with `icc train-heads`" if heads else "give the directory of the drafter's config.json"
        raise CheckpointError(f"--spec {choice.drafter}:{choice.path} is not a directory", hint)
    if options.calib is not None:
        chosen = find_quantization(options.quant)
        if not (chosen and chosen.calibrated) and heads is None:
            calibrated = ", ".join(name for name, found in QUANTIZATIONS.items() if found and found.calibrated)
            raise UsageError(
                f"--calib is not used by --quant {options.quant}, which reads no text",
                f"leave it out, or choose from: {calibrated}",
            )
    _check_device(options)
    if options.dump_passes is not None and options.dump_passes.exists() and not options.dump_passes.is_dir():
        raise UsageError(f"--dump-passes {options.dump_passes} is not a directory", "give another path")
    check_output(options.output, options.force)
    if target.backend == "cpu":
        find_compiler()
        if any(isa.needs_zig for isa in find_isas(target.arch, options.isa, options.os)):
            find_zig()


def _check_device(options: CompileOptions) -> None:
    """Raise UsageError if the device of --device does not exist, or nothing would compute on it."""
    if options.device == "cpu":
        return
    chosen = find_quantization(options.quant)
    if not (chosen and chosen.calibrated):
        raise UsageError(
            f"--device is where calibration computes, and --quant {options.quant} needs none", "leave --device out"
        )
    import torch

    _, _, number = options.device.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= count:
        seen = f"{count} GPU{'' if count == 1 else 's'}" if count else "no GPU"
        raise UsageError(f"--device {options.device}: torch {torch.__version__} sees {seen} here", "use --device cpu")


def _warnings(model: Path) -> tuple[str, ...]:
    """Warnings about files that a compile does not need but users of the engine may miss."""
    other = other_tokenizer(model)
    made = f"; AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) makes one of its {other}" if other else ""
    return (f"{model} has no {TOKENIZER}: the engine takes and gives token ids only{made}",)


def _costs(options: CompileOptions) -> tuple[str, ...]:
    """Warnings about options that are known to lose much."""
    found: list[str] = []
    if options.kv_cache == "int2":
        found.append(
            "--kv-cache int2 loses much: perplexity of SmolLM2-135M went from 10.3 to 32.0 (int4: 10.9); "
            "measure yours with icc eval"
        )
    if (policy := options.eviction) is not None:
        found.append(f"--kv-policy {policy} is lossy: {policy.loses}")
    return tuple(found)
