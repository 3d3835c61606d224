"""The options of a compile, as one checked value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..runtime.format.manifest import Pooling
from ..runtime.settings import setting
from . import drafters, quantization, targets
from .adapter_slots import AdapterSlots, read_adapter_slots
from .choices import POOLINGS, STATE_DTYPES, TASKS
from .eviction import ALL, EXPLAINED, Eviction, read_eviction
from .frontend.source.hub import is_hub_name
from .frontend.source.identify import CONFIG
from .kv_formats import AUTO, cache_options
from .option_checks import check_options
from .sizes import read_size
from .targets import find_target


@dataclass(frozen=True)
class CompileOptions:
    """Options of one compile. Limits are in tokens and sequences; None means the default for the model.

    isa: the machines and ISA levels that a CPU engine has libraries for, separated by commas; None means all levels of
    its target's machine, on Macs those of both machines. os: the operating systems, separated by commas; None means
    Linux. task: "embed" for an engine that makes one vector per prompt from hidden states, "rerank" for one that scores
    pairs of texts. pooling: how the vector is made; None means as the checkpoint says. quant_head: how the LM head is
    stored when `quant` is not none. group_size: weights per scale, of the head too; None means 128, or fewer if a
    layer's width demands it. keep: patterns of linears to leave unquantized. size, bits: the limit for `quant` "auto"
    on all weights as the engine stores them: in bytes, or in bits per parameter. kv_bits: the limit for the KV cache,
    in bits per number of a sequence of full length; the types are chosen per layer, by their effect on predictions for
    the calibration text. kv_policy: which tokens the KV cache keeps, see eviction.py; every policy but "all" loses
    information. gate: how much worse than its model the engine, kernels included, may be: "ppl=2%" (perplexity rises by
    at most so much), "kl=0.01" (mean Kullback-Leibler divergence per token, in nats); GateError if it loses more.
    passes: passes that run after canonicalize, in the syntax of `passes.registry.parse_passes`; "" for none. spec: the
    drafter of speculative decoding, "mtp", "eagle:DIR", "assistant:DIR", "dflash:DIR", "medusa:DIR",
    "layer-skip:LAYERS", "ngram", "suffix" or "none". spec_guesses: the size of the tree of draft heads at every batch
    size, instead of a size chosen by cost. deterministic: the bits of a request's logits do not depend on the rest of
    its batch; on a CPU they never do. step_kernel: decode steps of one sequence launch a layer's kernels as one, on
    NVIDIA GPUs. lora: an adapter that is merged first. adapters: see AdapterSlots. tensor_parallel, expert_parallel:
    the number of processes that run the engine together, each with parts of the weights; if both are given, they are
    the same ranks. sequence_parallel: work on a prompt that all ranks would repeat is divided by rows.
    pipeline_parallel: the number of stages, each with some layers. prefix: system prompts, or beginnings of
    conversations, whose KV the engine holds. schema, grammar: forms of answers, compiled in advance so that the first
    such request does not wait. like: an engine of another checkpoint with these shapes; the output has only the weights
    that differ from that engine's and takes everything else from it. tune: choose the blocks of CPU products by time,
    on this machine.
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
        "Instruction sets of a CPU engine, with commas: machines (x86-64, arm64) or levels (avx2).",
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
        "none",
        "Weights of the linear layers.",
        values=quantization.explained,
        open=True,
        metavar="METHOD",
        plan=True,
        on_demand=True,
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
        "Size of all weights for --quant auto: 92MB, 1.5GiB.",
        metavar="SIZE",
        unset="as --bits says",
        read=read_size,
    )
    bits: float | None = setting(None, "Bits per parameter, for --quant auto.", unset="4.5")
    group_size: int | None = setting(
        None, "Weights that share a scale.", metavar="16|32|64|128", unset="128, fewer where a layer demands it"
    )
    rotate: bool = setting(False, "Rotate channels first, so that none is much larger and rounding loses less.")
    keep: tuple[str, ...] = setting(
        (), "Leave matching linear layers unquantized (repeatable).", metavar="PATTERN", plan=True
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
        "Average bits per number of the KV cache; the type is chosen for each layer.",
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
        "The largest number of tokens in a step, of prompts and decodes together.",
        metavar="TOKENS",
        unset="512; on GPUs up to 8192, by memory and model",
        least=1,
        calibration=False,
        plan=True,
    )
    spec: str = setting(
        "none",
        "Drafter of speculative decoding.",
        values=lambda: drafters.EXPLAINED,
        open=True,
        metavar="DRAFTER",
        calibration=False,
    )
    spec_guesses: int | None = setting(
        None, "Guesses of draft heads per step, even if unprofitable.", unset="what pays", least=1, calibration=False
    )
    lora: Path | None = setting(None, "Merge this adapter into the weights.", metavar="DIR", unset="none", plan=True)
    adapters: str | None = setting(
        None,
        "Room for adapters (LoRA) loaded at run time: 8x16 holds 8 of rank 16 in memory at once.",
        metavar="SLOTSxRANK[+dora][:TARGETS]",
        unset="no room",
        calibration=False,
        plan=True,
    )
    pipeline_parallel: int | None = setting(
        None,
        "Divide layers among N ranks, which work one after the other; answers keep their bits.",
        metavar="N",
        unset="one rank",
        least=1,
        calibration=False,
    )
    tensor_parallel: int | None = setting(
        None,
        "Divide columns, rows, heads and vocabulary among N ranks.",
        metavar="N",
        unset="one rank",
        least=1,
        calibration=False,
    )
    expert_parallel: int | None = setting(
        None,
        "Divide whole experts among N ranks; answers keep their bits.",
        metavar="N",
        unset="one rank",
        least=1,
        calibration=False,
    )
    sequence_parallel: bool = setting(
        False, "With --tensor-parallel: norms and sums of prompts by rows.", calibration=False
    )
    deterministic: bool = setting(
        False, "GPUs: an answer's bits do not depend on its batch (on CPUs they never do).", calibration=False
    )
    step_kernel: bool = setting(False, "NVIDIA GPUs: one kernel per layer in steps of one sequence.", calibration=False)
    like: Path | None = setting(
        None,
        "Write a delta: only the weights that differ from this engine, compiled with its options.",
        metavar="ENGINE",
        unset="a whole engine",
        engine=False,
    )
    prefix: tuple[Path, ...] = setting(
        (),
        "Store the KV of this system prompt: a text file, or messages in a .json file (repeatable).",
        metavar="FILE",
        calibration=False,
        engine=False,
    )
    schema: tuple[Path, ...] = setting(
        (),
        "Compile this JSON schema for answers into the engine (repeatable).",
        metavar="FILE",
        calibration=False,
        engine=False,
    )
    grammar: tuple[Path, ...] = setting(
        (),
        "Compile this grammar into the engine, in Lark's or llama.cpp's notation (repeatable).",
        metavar="FILE",
        calibration=False,
        engine=False,
    )
    tune: bool = setting(
        False, "Choose CPU kernels by time on this machine (--target native; takes a minute or two).", calibration=False
    )
    seed: int = setting(0, "Seed of all random choices.")
    passes: str = setting("", "Passes of packages to run after canonicalize.", metavar="PASS[,PASS]", unset="none")
    dump_passes: Path | None = setting(
        None, "Write the graph after each pass here.", metavar="DIR", unset="no", engine=False
    )
    force: bool = setting(False, "Replace an engine that exists.", engine=False)

    def __post_init__(self) -> None:
        self._resolve_target()
        check_options(self)
        object.__setattr__(self, "kv_policy", ALL if self.eviction is None else str(self.eviction))  # the option's text

    @cached_property
    def eviction(self) -> Eviction | None:
        """The parsed kv_policy; None if the cache keeps all tokens."""
        return read_eviction(self.kv_policy)

    @cached_property
    def adapter_slots(self) -> AdapterSlots | None:
        """The parsed --adapters; None for no slots."""
        return None if self.adapters is None else read_adapter_slots(self.adapters)

    @property
    def ranks(self) -> int:
        """How many processes run the engine together."""
        return max(self.tensor_parallel or 1, self.expert_parallel or 1) * (self.pipeline_parallel or 1)

    def _resolve_target(self) -> None:
        if self.target == targets.AUTO:
            object.__setattr__(self, "target", find_target(self.target).name)


def default_output(model: Path) -> Path:
    """The default output: model.engine beside model/, model.gguf or model.onnx; for a name on the hub, ORG/NAME,
    NAME.engine in the current directory."""
    if is_hub_name(model):
        return Path.cwd() / (model.name.partition("@")[0] + ".engine")
    resolved = model.resolve()
    resolved = resolved.parent if resolved.is_file() and resolved.name == CONFIG else resolved
    return resolved.with_name(resolved.name.removesuffix(".gguf").removesuffix(".onnx") + ".engine")
