"""icc.compile: compile from Python, with progress reports."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args, get_type_hints

from ..runtime.format.manifest import Pooling
from ..runtime.settings import settings
from .errors import UsageError
from .options import CompileOptions, default_output
from .progress import CompileProgress, LoggingReporter, Reporter
from .several import compile_all, for_targets, refit_all

PathLike = str | os.PathLike[str]


class CompileFields(TypedDict, total=False):
    """The fields of CompileOptions as keywords of icc.compile. CompileOptions documents each; a test keeps the two
    equal.

    size is in bytes, group_size in weights, max_batch_size in sequences.
    """

    target: str
    isa: str | None
    os: str | None
    task: str
    pooling: Pooling | None
    quant: str
    quant_head: str
    size: int | None
    bits: float | None
    group_size: int | None
    rotate: bool
    keep: tuple[str, ...]
    calib: PathLike | None
    calib_sequences: int
    calib_length: int
    device: str
    gate: tuple[str, ...]
    gate_text: PathLike | None
    kv_cache: str
    kv_bits: float | None
    state_cache: str
    kv_policy: str
    max_seq_len: int | None
    max_batch_size: int | None
    max_step_tokens: int | None
    spec: str
    spec_guesses: int | None
    lora: PathLike | None
    adapters: str | None
    pipeline_parallel: int | None
    tensor_parallel: int | None
    expert_parallel: int | None
    sequence_parallel: bool
    deterministic: bool
    step_kernel: bool
    like: PathLike | None
    prefix: Sequence[PathLike]
    schema: Sequence[PathLike]
    grammar: Sequence[PathLike]
    tune: bool
    seed: int
    passes: str
    dump_passes: PathLike | None
    force: bool


def _path_fields() -> list[str]:
    """The options that are files or directories."""
    hints = get_type_hints(CompileOptions)
    return [name for name in settings(CompileOptions) if Path in (hints[name], *get_args(hints[name]))]


def _path(given: PathLike | Sequence[PathLike]) -> Path | tuple[Path, ...]:
    if isinstance(given, str | os.PathLike):
        return Path(os.fspath(given))
    return tuple(Path(os.fspath(one)) for one in given)


def compile_model(
    model: PathLike,
    output: PathLike | None = None,
    *,
    progress: Literal["bar"] | Callable[[CompileProgress], object] | None = None,
    **options: Unpack[CompileFields],
) -> Path:
    """Compile a Hugging Face checkpoint, a directory or the name of a model on the hub, to an engine directory
    (default: MODEL.engine); returns its path. Several targets, with commas, give one engine that has all of them.

    `options` are the fields of CompileOptions: target, quant, max_seq_len, force, ... progress: "bar" shows it on
    standard error, as the command line does; a function is called after each unit of work. Stages and warnings always
    go to the logger "icc.compile". Raises IccError with one clear line, and then leaves no files behind.
    """
    unknown = set(options) - set(CompileOptions.__dataclass_fields__)
    if unknown:
        raise UsageError(f"unknown compile option {sorted(unknown)[0]!r}", "options are the fields of CompileOptions")
    paths = {name: _path(options[name]) for name in _path_fields() if options.get(name) is not None}  # type: ignore[literal-required]
    source = Path(model)
    target = Path(output) if output is not None else default_output(source)
    given: dict[str, Any] = {**options, **paths}
    asked = for_targets(source, target, given)
    with _reporter(progress) as reporter:
        compile_all(asked, reporter)
    return target


def refit_model(
    engine: PathLike,
    checkpoint: PathLike,
    output: PathLike | None = None,
    *,
    progress: Literal["bar"] | Callable[[CompileProgress], object] | None = None,
    force: bool = False,
    calib: PathLike | None = None,
    gate_text: PathLike | None = None,
    lora: PathLike | None = None,
    spec: str | None = None,
) -> Path:
    """Put the weights of a checkpoint into an engine without changing its program and kernels; returns the engine's
    path.

    The checkpoint must have the shapes of the one that the engine was compiled from, and is quantized in the same way.
    output: another engine directory, which `force` may replace; default: the engine's own, which is replaced as a
    whole. Files that were given at the compile (calib, gate_text, lora) must be given again. progress: see
    `compile_model`. MismatchError names what does not fit; the engine is then unchanged.
    """
    files = {"calib": calib, "gate_text": gate_text, "lora": lora}
    given = {name: None if path is None else Path(path) for name, path in files.items()}
    other = None if output is None else Path(output)
    with _reporter(progress) as reporter:
        refit_all(Path(engine), Path(checkpoint), other, force, {**given, "spec": spec}, reporter)
    return other or Path(engine)


def _reporter(progress: Literal["bar"] | Callable[[CompileProgress], object] | None) -> Reporter:
    if progress == "bar":
        from .console import ConsoleReporter

        return ConsoleReporter()
    if progress is not None and not callable(progress):
        raise UsageError(f"progress = {progress!r}: must be 'bar' or a function")
    return LoggingReporter(progress)


def _signature() -> inspect.Signature:
    """The signature that help() shows: the options with their defaults."""
    own = [p for p in inspect.signature(compile_model).parameters.values() if p.kind is not p.VAR_KEYWORD]
    fields = [p for p in inspect.signature(CompileOptions).parameters.values() if p.name not in ("model", "output")]
    keywords = [p.replace(kind=p.KEYWORD_ONLY) for p in fields]
    return inspect.Signature([*own, *keywords], return_annotation=Path)


compile_model.__signature__ = _signature()  # type: ignore[attr-defined]
