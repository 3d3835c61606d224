"""What a compile is asked to do, as one checked value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..passes.registry import check_names
from ..runtime.format.exchange import MAX_RANKS as MAX_GPUS
from ..runtime.format.manifest import Pooling
from ..runtime.settings import setting, settings
from ..runtime.system import LINUX
from . import quantization, targets
from .adapter_slots import AdapterSlots, read_adapter_slots
from .backends.cpu.isa import find_isas
from .drafters import LAYERS
from .errors import UsageError
from .eviction import ALL, EXPLAINED, Eviction, read_eviction
from .frontend.source.hub import is_hub_name
from .frontend.source.identify import CONFIG
from .gates import parse_gates
from .kv_formats import AUTO, cache_options, read_cache_option
from .quantization import GROUPS, QUANTIZATIONS, ROWS8, find_quantization, head_format
from .sizes import check_auto, read_size
from .targets import find_target

MAX_RANKS, MAX_STAGES = 64, 24  # on CPUs; the latter of several ranks each, see stages.h
TASKS = {"generate": "text", "embed": "one vector per text", "rerank": "one score per pair of texts"}
POOLINGS: dict[Pooling, str] = {
    "last": "the hidden state of the last token",
    "mean": "the mean over all tokens",
    "cls": "the hidden state of the first token",
    "max": "the maximum of each element",
    "weightedmean": "the mean with weights 1, 2, 3 .. by position",
    "mean_sqrt_len": "the sum over the root of the number of tokens",
}
STATE_DTYPES = {
    "f32": "what the model does",
    "bf16": "half the memory; matrices and vectors rounded to 8 bits of precision",
}


@dataclass(frozen=True)
class CompileOptions:
    """Options of one compile. Limits are in tokens and sequences; None means the default for the model.

    isa: the machines and levels that a CPU engine has libraries for, with commas; None means those of its target's
    machine, and on Macs those of both. os: the operating systems, with commas; None means Linux. task: "embed" for an
    engine that makes one vector per prompt of its hidden states. pooling: which of them make it; None means what the
    checkpoint says. "rerank" for one that scores pairs of texts. quant_head: how the LM head is stored when `quant` is
    not none. group_size: weights per scale, of the head too; None means 128, or fewer
    where a layer's width demands it. keep: patterns of linears to leave unquantized. size, bits: what `quant` "auto"
    may spend, on all weights as the engine stores them: in bytes, or in bits per parameter. kv_bits: what the KV cache
    may take, in bits per number of a sequence of full length; the types are chosen layer by layer, by what they cost
    the predictions for the calibration text. kv_policy: which tokens attention goes on reading, see eviction.py: all
    but "all" lose something. gate: what the engine, kernels included, may lose against the model that it is made of:
    "ppl=2%" (perplexity rises by at most so much), "kl=0.01" (mean Kullback-Leibler divergence per token, in nats);
    GateError if it loses more. passes: passes that run behind those of canonicalize, as `passes.registry.parse_passes`
    reads them; "" for none. spec: the drafter of speculative decoding, "mtp", "eagle:DIR", "assistant:DIR",
    "dflash:DIR", "medusa:DIR", "layer-skip:LAYERS", "ngram", "suffix" or "none". spec_guesses: the size of the tree of
    draft heads at every batch size, instead of what its cost says. deterministic: a request's logits have the same bits
    whatever else is in its steps; on a CPU they always do. step_kernel: decode steps of one sequence launch a layer's
    kernels as one, on NVIDIA GPUs. lora: an adapter that is merged first. adapters: see
    AdapterSlots. tensor_parallel, expert_parallel: processes that run the engine together, each with parts of the
    weights; where both are given, they are the same ranks. sequence_parallel: what they would all do alike of a prompt
    is divided by rows. pipeline_parallel: each with some layers. prefix: system prompts, or beginnings of
    conversations, whose KV the engine has. schema, grammar: what answers follow, so that the first that does waits for
    nothing. like: an engine of another checkpoint of these shapes; what is written has the weights that differ from
    its, and takes everything else from it. tune: choose the blocks of CPU products by time, on this machine.
    """

    model: Path
    output: Path
    target: str = setting(
        "cpu",
        "What to compile for.",
        values=targets.explained,
        open=True,
        metavar="TARGET",
        calibration=False,
        on_demand=True,
    )
    isa: str | None = setting(
        None,
        "Instruction sets of a CPU engine: machines, or levels of them.",
        metavar="x86-64|arm64|LEVEL[,..]",
        unset="all of the target's machine",
        calibration=False,
    )
    os: str | None = setting(
        None,
        "Operating systems that a CPU engine has libraries for.",
        metavar="linux|macos|windows[,..]",
        unset="linux",
        calibration=False,
    )
    task: str = setting("generate", "What the engine gives.", values=lambda: TASKS, plan=True)
    pooling: Pooling | None = setting(
        None,
        "How --task embed makes one vector of many.",
        values=lambda: POOLINGS,
        unset="the checkpoint's, or last, or of encoders mean",
    )
    quant: str = setting(
        "none", "Weights of the linear layers.", values=quantization.explained, plan=True, on_demand=True
    )
    quant_head: str = setting(
        "int8",
        "The LM head, where the linear layers are quantized.",
        values=quantization.heads_explained,
        plan=True,
        on_demand=True,
    )
    size: int | None = setting(
        None,
        "Bytes of all weights, for --quant auto: 92MB, 1.5GiB.",
        metavar="SIZE",
        unset="as --bits says",
        read=read_size,
    )
    bits: float | None = setting(None, "Bits per parameter, for --quant auto.", unset="4.5")
    group_size: int | None = setting(
        None, "Weights that share a scale.", metavar="16|32|64|128", unset="128, fewer where a layer demands it"
    )
    rotate: bool = setting(False, "Rotate channels first, which evens them out: less is lost to rounding.")
    keep: tuple[str, ...] = setting(
        (), "Leave matching linears unquantized (repeatable).", metavar="PATTERN", plan=True
    )
    calib: Path | None = setting(None, "UTF-8 text to calibrate on.", metavar="FILE", unset="a bundled one")
    calib_sequences: int = setting(32, "Sequences to calibrate on.", least=1)
    calib_length: int = setting(512, "Tokens per calibration sequence.", least=1)
    device: str = setting("cpu", "Where calibration computes: cpu, cuda or cuda:N.", metavar="cpu|cuda")
    gate: tuple[str, ...] = setting(
        (), "Fail if the engine loses more: ppl=2%, kl=0.01 (repeatable).", metavar="METRIC=LIMIT"
    )
    gate_text: Path | None = setting(None, "UTF-8 text to measure --gate on.", metavar="FILE", unset="a bundled one")
    kv_cache: str = setting(
        AUTO, "Numbers of the KV cache.", values=cache_options, calibration=False, plan=True, on_demand=True
    )
    kv_bits: float | None = setting(
        None,
        "Bits per number of the KV cache: for each layer what pays.",
        unset="as --kv-cache says",
        calibration=False,
        plan=True,
        on_demand=True,
    )
    state_cache: str = setting(
        "f32", "Numbers of recurrent states.", values=lambda: STATE_DTYPES, calibration=False, plan=True, on_demand=True
    )
    kv_policy: str = setting(
        ALL,
        "Which tokens the KV cache keeps.",
        values=lambda: EXPLAINED,
        open=True,
        metavar="POLICY",
        calibration=False,
        plan=True,
        on_demand=True,
    )
    max_seq_len: int | None = setting(
        None,
        "Longest sequence, prompt included.",
        unset="the model's, at most 4096",
        metavar="TOKENS",
        least=1,
        on_demand=True,
    )
    max_batch_size: int | None = setting(
        None,
        "Most sequences of a step.",
        metavar="N",
        unset="16; on GPUs up to 256, by memory and model",
        least=1,
        calibration=False,
        on_demand=True,
    )
    max_step_tokens: int | None = setting(
        None,
        "Most tokens of a step, of prompts and decodes.",
        metavar="TOKENS",
        unset="512; on GPUs up to 8192, by memory and model",
        least=1,
        calibration=False,
        plan=True,
    )
    spec: str = setting(
        "none",
        "Drafter of speculative decoding.",
        values=lambda: {
            "none": "no speculation",
            "mtp": "the checkpoint's layer that predicts further tokens",
            "eagle:DIR": "the EAGLE-3 drafter in this directory",
            "assistant:DIR": "the assistant in this directory, which reads the model's keys and values",
            "dflash:DIR": "the DFlash drafter in this directory, which guesses a block at once",
            "medusa:DIR": "the heads in this directory, see icc train-heads",
            "layer-skip:LAYERS": "the model's first layers",
            "ngram": "what followed the same tokens before",
            "suffix": "what most often followed them, in past answers too",
            "lookahead[:W,N,G]": "n-grams that the model finds meanwhile",
        },
        open=True,
        metavar="DRAFTER",
        calibration=False,
    )
    spec_guesses: int | None = setting(
        None, "Guesses of draft heads per step, paying or not.", unset="what pays", least=1, calibration=False
    )
    lora: Path | None = setting(None, "Merge this adapter into the weights.", metavar="DIR", unset="none", plan=True)
    adapters: str | None = setting(
        None,
        "Room for adapters (LoRA) that come at run time: 8x16 for 8 of rank 16 in memory at once.",
        metavar="SLOTSxRANK[+dora][:TARGETS]",
        unset="no room",
        calibration=False,
        plan=True,
    )
    pipeline_parallel: int | None = setting(
        None,
        "Divide layers among N ranks, which work one after the other: the same bits.",
        metavar="N",
        unset="one rank",
        least=1,
        calibration=False,
    )
    tensor_parallel: int | None = setting(
        None,
        "Divide columns, rows, heads and words among N ranks.",
        metavar="N",
        unset="one rank",
        least=1,
        calibration=False,
    )
    expert_parallel: int | None = setting(
        None,
        "Divide experts, whole, among N ranks: the same bits.",
        metavar="N",
        unset="one rank",
        least=1,
        calibration=False,
    )
    sequence_parallel: bool = setting(
        False, "With --tensor-parallel: norms and sums of prompts by rows.", calibration=False
    )
    deterministic: bool = setting(
        False, "GPUs: same bits whatever else is in a batch (CPUs: always so).", calibration=False
    )
    step_kernel: bool = setting(
        False, "NVIDIA GPUs: the launches of a layer as one kernel, for one sequence.", calibration=False
    )
    like: Path | None = setting(
        None,
        "Write what differs from this engine, with its options, to open beside it.",
        metavar="ENGINE",
        unset="a whole engine",
        engine=False,
    )
    prefix: tuple[Path, ...] = setting(
        (),
        "Put the KV of this system prompt in: a text, or messages in a .json file (repeatable).",
        metavar="FILE",
        calibration=False,
        engine=False,
    )
    schema: tuple[Path, ...] = setting(
        (),
        "Put this JSON schema in, lowered, for answers to follow (repeatable).",
        metavar="FILE",
        calibration=False,
        engine=False,
    )
    grammar: tuple[Path, ...] = setting(
        (),
        "Put this grammar in, in Lark's or llama.cpp's notation (repeatable).",
        metavar="FILE",
        calibration=False,
        engine=False,
    )
    tune: bool = setting(
        False, "Choose CPU kernels by time, here (--target native; takes a minute or two).", calibration=False
    )
    seed: int = setting(0, "Of everything that is drawn.")
    passes: str = setting("", "Passes to add behind canonicalize, of packages.", metavar="PASS[,PASS]", unset="none")
    dump_passes: Path | None = setting(
        None, "Write the graph after each pass here.", metavar="DIR", unset="no", engine=False
    )
    force: bool = setting(False, "Replace an engine that exists.", engine=False)

    def __post_init__(self) -> None:
        self._resolve_target()
        _choice("--task", self.task, tuple(TASKS))
        find_quantization(self.quant)
        head_format(self.quant_head)
        self._check_step_kernel()
        read_cache_option(self.kv_cache)
        _choice("--state-cache", self.state_cache, tuple(STATE_DTYPES))
        policy = self.eviction
        object.__setattr__(self, "kv_policy", ALL if policy is None else str(policy))  # as written out
        if policy is not None and policy.chooses:
            if find_target(self.target).backend != "cpu":
                raise UsageError(
                    f"--kv-policy {policy}: there are no kernels for --target {self.target}",
                    "use --target cpu, or --kv-policy streaming",
                )
            if self.spec != "none":
                raise UsageError(f"--kv-policy {policy}: what guesses evict cannot be taken back", "leave --spec out")
        if policy is not None and self.task != "generate":
            raise UsageError(f"--kv-policy is for texts that go on, and --task {self.task} reads whole ones")
        self._check_isa()
        if self.tune and not find_target(self.target).is_here:
            raise UsageError(
                f"--tune measures this machine, and --target {self.target} is not only for it",
                "use --target native; for a GPU: icc tune ENGINE, on a host that has it",
            )
        self._check_group()
        self._check_rows8()
        if self.quant == "none":
            self._check_unquantized()
        if self.device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", self.device):
            raise UsageError(f"--device {self.device!r} is unknown", "choose from: cpu, cuda, cuda:N")
        self._check_task()
        check_auto(self.quant, self.size, self.bits)
        if self.quant == "auto":
            self._check_auto()
        self._check_kv_bits()
        self._check_adapters()
        self._check_ranks()
        parse_gates(self.gate)
        check_names(self.passes)
        if self.gate_text is not None and not self.gate:
            raise UsageError("--gate-text is for --gate", "add --gate ppl=2%, or leave --gate-text out")
        for name, found in settings(type(self)).items():
            value = getattr(self, name)
            if found.least is not None and value is not None and value < found.least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {found.least}, not {value}")

    def _check_isa(self) -> None:
        if self.isa is None and self.os is None:
            return
        target, option = find_target(self.target), "--os" if self.isa is None else "--isa"
        if target.backend != "cpu" or target.is_here:
            why = "is for this machine's CPU" if target.is_here else "is for a GPU"
            given = f"{option} {self.isa or self.os}: --target {self.target} {why}"
            raise UsageError(given, f"use --target cpu, or leave {option} out")
        isas = find_isas(target.arch, self.isa, self.os)
        if self.ranks > 1 and any(isa.system != LINUX for isa in isas):
            raise UsageError(
                f"--os {self.os}: several ranks run on Linux alone", "compile for one rank, or leave --os out"
            )

    def _check_unquantized(self) -> None:
        head = self.quant_head not in ("none", type(self).quant_head)
        for option, given, does in (
            ("--rotate", self.rotate, "evens out what is rounded, and --quant none rounds nothing"),
            ("--keep", bool(self.keep), "leaves layers unquantized, and --quant none quantizes none"),
            (f"--quant-head {self.quant_head}", head, "is for models that are quantized, not --quant none"),
        ):
            if given:
                raise UsageError(f"{option} {does}", f"give a --quant, or leave {option.partition(' ')[0]} out")

    def _check_group(self) -> None:
        if self.group_size is None:
            return
        if self.group_size not in GROUPS:
            sizes = ", ".join(map(str, reversed(GROUPS)))
            raise UsageError(f"--group-size {self.group_size}: there are no kernels for it", f"choose from: {sizes}")
        chosen = find_quantization(self.quant)
        if chosen is None or not chosen.grouped:
            grouped = ", ".join(name for name, found in QUANTIZATIONS.items() if found is not None and found.grouped)
            raise UsageError(f"--group-size is not used by --quant {self.quant}", f"choose from: {grouped}")

    def _check_rows8(self) -> None:
        chosen = find_quantization(self.quant)
        if chosen is not None and chosen.format == ROWS8 and find_target(self.target).backend == "hip":
            raise UsageError(
                f"--quant {self.quant}: there are no products with rows of 8 bits for --target {self.target}",
                f"use --quant {self.quant.removesuffix('a8')}",
            )

    def _check_auto(self) -> None:
        for name, default in (("quant_head", "int8"), ("group_size", None), ("device", "cpu")):
            if getattr(self, name) != default:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} has no meaning with --quant auto", f"leave {option} out")

    def _check_kv_bits(self) -> None:
        if self.kv_bits is None:
            return
        if not 0 < self.kv_bits <= 32:
            raise UsageError(f"--kv-bits {self.kv_bits:g} is no number of bits", "give 2.6 to 16")
        if self.kv_cache != AUTO:
            raise UsageError(
                f"--kv-cache {self.kv_cache} and --kv-bits both say what the KV cache holds", "leave one of them out"
            )
        if self.task != "generate":
            raise UsageError(f"--kv-bits is for texts that go on, and --task {self.task} reads whole ones")

    @cached_property
    def eviction(self) -> Eviction | None:
        """What kv_policy says, read; None where the cache keeps all tokens."""
        return read_eviction(self.kv_policy)

    @cached_property
    def adapter_slots(self) -> AdapterSlots | None:
        """What --adapters says, read; None for no room."""
        return None if self.adapters is None else read_adapter_slots(self.adapters)

    @property
    def ranks(self) -> int:
        """How many processes run the engine together."""
        return max(self.tensor_parallel or 1, self.expert_parallel or 1) * (self.pipeline_parallel or 1)

    def _check_ranks(self) -> None:
        if self.sequence_parallel:
            self._check_rows()
        if self.ranks == 1:
            return
        self._check_stages()
        both = [n for n in (self.tensor_parallel, self.expert_parallel) if n is not None and n > 1]
        if len(set(both)) > 1:
            raise UsageError(
                f"--tensor-parallel {self.tensor_parallel} and --expert-parallel {self.expert_parallel} differ, "
                "and are of the same ranks",
                "give both the same number",
            )
        target = find_target(self.target)
        most = MAX_RANKS if target.backend == "cpu" else MAX_GPUS
        if self.ranks > most:
            raise UsageError(f"{self.ranks} ranks are more than the {most} that --target {self.target} can have")
        given = {
            "--tune": self.tune,
            f"--spec {self.spec}": self.spec.partition(":")[0] in LAYERS,
        }
        for option, is_given in given.items():
            if is_given:
                raise UsageError(f"{option} does not work with several ranks", "leave it out, or compile for one rank")
        if target.backend != "cpu" and self.spec.startswith(("medusa:", "layer-skip:")):
            hint = "leave it out, or compile for one rank, or for CPUs"
            raise UsageError(f"--spec {self.spec} does not work with several ranks of a GPU", hint)
        if target.backend != "cpu" and not target.link:
            raise UsageError(f"several ranks: nothing is known of links between GPUs of --target {self.target}")

    def _check_rows(self) -> None:
        if (self.tensor_parallel or 1) == 1:
            raise UsageError("--sequence-parallel divides what ranks of --tensor-parallel do alike", "give both")

    def _resolve_target(self) -> None:
        if self.target == targets.AUTO:
            object.__setattr__(self, "target", find_target(self.target).name)

    def _check_step_kernel(self) -> None:
        if self.step_kernel and find_target(self.target).backend != "cuda":
            raise UsageError(f"--step-kernel is for NVIDIA GPUs: --target {self.target} is none", "leave it out")

    def _check_stages(self) -> None:
        if (self.pipeline_parallel or 1) == 1:
            return
        if find_target(self.target).backend != "cpu":
            raise UsageError(f"--pipeline-parallel is for CPUs: there are no kernels of it for --target {self.target}")
        if (self.pipeline_parallel or 1) > MAX_STAGES and self.ranks > (self.pipeline_parallel or 1):
            said = f"--pipeline-parallel {self.pipeline_parallel}: at most {MAX_STAGES} stages of several ranks"
            raise UsageError(said, "give fewer stages, of more ranks each")
        given = {
            "--sequence-parallel": self.sequence_parallel,
            f"--spec {self.spec}": self.spec.startswith(("medusa:", "layer-skip:")),
            f"--kv-policy {self.kv_policy}": self.eviction is not None and self.eviction.chooses,
        }
        for option, is_given in given.items():
            if is_given:
                raise UsageError(f"{option} does not work with --pipeline-parallel", "leave one of them out")

    def _check_adapters(self) -> None:
        if self.adapter_slots is None:
            return
        if self.rotate:
            raise UsageError(
                "--adapters and --rotate: adapters were trained for channels as they were", "leave one out"
            )

    def _check_task(self) -> None:
        if self.pooling is not None:
            _choice("--pooling", self.pooling, tuple(POOLINGS))
            if self.task != "embed":
                raise UsageError("--pooling is for engines that embed", "add --task embed")
        if self.task != "generate" and self.prefix:
            raise UsageError(f"--prefix: --task {self.task} reads whole texts, and keeps none", "leave --prefix out")
        if self.task != "generate" and (self.schema or self.grammar):
            raise UsageError(f"--schema and --grammar are for answers, and --task {self.task} gives none")
        if self.eviction is not None and self.eviction.chooses and self.prefix:
            raise UsageError(
                f"--prefix: --kv-policy {self.eviction} gives up tokens by what comes later", "leave one of them out"
            )
        if self.task != "generate" and self.gate:
            raise UsageError(f"--gate compares predictions, and --task {self.task} makes none", "leave --gate out")
        if self.task != "generate" and (self.spec != "none" or self.spec_guesses is not None):
            raise UsageError(f"--task {self.task} generates no tokens that --spec could guess", "leave --spec out")


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{option} {value!r} is unknown", f"choose from: {', '.join(allowed)}")


def default_output(model: Path) -> Path:
    """model/, model.gguf or model.onnx -> model.engine beside it; a name on the hub, ORG/NAME -> NAME.engine here."""
    if is_hub_name(model):
        return Path.cwd() / (model.name.partition("@")[0] + ".engine")
    resolved = model.resolve()
    resolved = resolved.parent if resolved.is_file() and resolved.name == CONFIG else resolved
    return resolved.with_name(resolved.name.removesuffix(".gguf").removesuffix(".onnx") + ".engine")
