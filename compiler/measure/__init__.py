"""Everything in the compiler that runs an engine. The rest of the compiler uses it through these functions, which
import it when they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...passes.quantized import QuantRecord
    from ...runtime.commands.evaluate import Evaluation
    from ...runtime.format.forms import CompiledForm
    from ...runtime.format.manifest import GateFacts, Limits
    from ...runtime.format.prompts import CompiledPrompt, CompiledPrompts
    from ..backends.base import Built
    from ..backends.triton.tiling.tuned import TuningFile
    from ..gates import GatePlan
    from ..graph.graph import Graph
    from ..prompt_files import FormFile, PromptFile, PromptTokens
    from ..speculate.tree import Cost
    from ..targets import Target

Progress = Callable[[str, int, int], None]


def tune(stage: Path, target: Target, built: Built, limits: Limits, progress: Progress) -> tuple[Built, list[str]]:
    """`icc compile --tune`: build the kernels in `stage` again, with the fastest blocks on this machine. Also returns
    the names of the blocks that are not the default."""
    from .cpu_tune import tune_here

    return tune_here(stage, target, built, limits, progress)


def step_cost(stage: Path, target: Target, built: Built, limits: Limits) -> Cost:
    """The measured cost of steps of the engine in `stage` on this machine, in seconds."""
    from .step_times import measured_cost

    return measured_cost(stage, target, built, limits)


def tune_engine(engine: Path, file: Path | None, progress: Progress) -> tuple[Path, TuningFile]:
    """`icc tune`: measure the fastest tilings of an engine's kernels on this machine's GPU. Returns the file that has
    them, and its content. file: None for TARGET.json in the current directory. UsageError if the engine is not for
    CUDA."""
    from ...runtime.format.load import open_engine
    from .gpu_tune import tune

    opened = open_engine(engine)
    try:
        file = file or Path(f"{opened.manifest.target}.json")
        return file, tune(opened, file, progress)
    finally:
        opened.close()


def perplexity(checkpoint: Path, engine: Path, text: Path) -> Evaluation:
    """`icc eval --baseline`: how well an unquantized checkpoint predicts a text, cut into windows as for an engine."""
    from .baseline import evaluate_checkpoint

    return evaluate_checkpoint(checkpoint, engine, text)


def check_device(target: Target) -> None:
    """UsageError if engines for the target cannot be run on this machine."""
    from . import gate

    gate.check_device(target)


def measure_loss(
    engine: Path,
    plan: GatePlan,
    reference: Graph,
    quantized: Graph,
    records: Sequence[QuantRecord],
    progress: Progress,
) -> GateFacts:
    """`icc compile --gate`: measure what an engine loses against the model that it was compiled from. GateError if it
    is too much."""
    from . import gate

    return gate.gate(engine, plan, reference, quantized, records, progress)


def check_answers(engine: Path, target: Target) -> None:
    """Raise WrongAnswersError unless an engine gives its canary answers. Engines that this machine cannot run are not
    checked."""
    if target.backend == "cpu":
        from . import answers

        answers.check_answers(engine)


def read_prompts(files: Sequence[PromptFile], texts: Path) -> list[PromptTokens]:
    """`icc compile --prefix`: the tokens that prompts begin with, by the model's own template and tokenizer. UsageError
    if a file cannot be the beginning of prompts."""
    from . import prompts

    return prompts.read_prompts(files, texts)


def lower_forms(files: Sequence[FormFile]) -> list[CompiledForm]:
    """`icc compile --schema` and `--grammar`: lowered grammars of answers. UsageError for a grammar that no answer can
    follow."""
    from . import forms

    return forms.lower_forms(files)


def check_readable(file: FormFile, tokenizer: Path, vocab_size: int) -> None:
    """Raise UsageError if the tokens of a model cannot follow any grammar, as `icc compile --schema` and `--grammar`
    require. file: one of their files, for the message. tokenizer: path of tokenizer.json. vocab_size: in tokens."""
    from . import forms

    forms.check_readable(file, tokenizer, vocab_size)


def compute_prompts(stage: Path, target: Target, wanted: Sequence[CompiledPrompt]) -> CompiledPrompts | None:
    """The KV of prompts, computed by the engine in `stage` and written to files in it; None if this machine cannot run
    it."""
    if target.backend != "cpu":
        return None
    from . import prompts

    return prompts.compute_prompts(stage, wanted)


def available_bytes() -> int:
    """Bytes of this machine's memory that can be allocated without swapping."""
    from . import host

    return host.available_bytes()


def num_threads() -> int:
    """The number of threads that kernels get on this machine."""
    from . import host

    return host.usable_cores()


def memory_bandwidth(nbytes: int) -> float:
    """The measured speed, in GB/s, at which all cores of this machine read `nbytes` bytes repeatedly. Takes 0.2 s."""
    from . import host

    return host.read_bandwidth(nbytes=nbytes)
