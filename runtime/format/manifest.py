"""engine.json: the typed, versioned, closed description of an engine directory. The runtime owns the format."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import EngineFormatError
from ..system import LINUX

FORMAT_VERSION = 3  # 3: programs by name, sections with declared inputs and outputs; 2: typed steps
READ_VERSIONS = (2, FORMAT_VERSION)  # see version2.py
MAIN = "main"  # the program that every engine has
# The version of the interface between kernels, program and runtime, by backend: for "cpu" ICC_ABI_VERSION of abi.h, for
# GPUs the arguments of a launch and the meaning of the plan. It is in the manifest, so that no other file must be read
# to check it.
KERNEL_ABI = {"cpu": 6, "cuda": 2, "hip": 2}

PIECE = 4 << 20  # bytes; part of the format

TEMPLATE_DIR = "additional_chat_templates"  # folder of a tokenizer's further templates, as transformers saves them

# which hidden states of a prompt make its vector, and how
Pooling = Literal["last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len"]
POOLED_ROWS = ("mean", "max", "weightedmean", "mean_sqrt_len")  # poolings that use every token


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Size in bytes and sha256 (hex) of one file of the engine.

    A file of more than PIECE bytes also has a digest per PIECE bytes. These are compared when an engine is opened,
    because threads can share that work. hash: their kind, BLAKE3 if the engine's own library computes it.
    """

    size: int
    sha256: str
    pieces: list[str] = []
    hash: Literal["sha256", "blake3"] = "sha256"


class ModelFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts that the runtime needs about the model. `architecture` is for display only; no code depends on it.

    vocab_size: in tokens. hidden_size: numbers per token.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_parameters: int
    max_seq_len: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    pad_token_id: int | None


class QuantFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How weights are stored. `bits_per_weight` is the average over all parameters and includes scales and zero
    points."""

    method: str
    bits_per_weight: float
    kept: list[str]  # linear layers that are not quantized, "name: reason"


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Static limits: sequence length, sequences per step and tokens per step."""

    max_seq_len: int
    max_batch_size: int
    max_step_tokens: int


# inclusive bounds of the fields below, in a checkpoint and in a request
SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


class SamplingDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sampling fields of the checkpoint's generation_config.json. temperature None: greedy (in `generate` and `icc
    run`; see `of_conversations`); another field None: off."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def of_conversations(self) -> SamplingDefaults:
        """The defaults of the server and of conversations: the model's own, and temperature 1.0 if it has none, as in
        OpenAI's API."""
        return self if self.temperature is not None else msgspec.structs.replace(self, temperature=1.0)

    def of_terminals(self) -> SamplingDefaults:
        """The defaults of `icc chat`: the model's own, and those of llama.cpp and Ollama if it has no temperature. At
        1.0 small models make up words, and users of a terminal know those two programs."""
        if self.temperature is not None:
            return self
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return SamplingDefaults(**{"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, **given})


class Library(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One compiled kernel library. isa: the name of its level. cpu_flags: the /proc/cpuinfo flags that it needs.
    system: its operating system, one of system.SYSTEMS."""

    isa: str
    path: str
    cpu_flags: list[str]
    system: str = LINUX

    @property
    def title(self) -> str:
        """The ISA level, and the system if it is not Linux."""
        return self.isa if self.system == LINUX else f"{self.isa}-{self.system}"


class ProgramEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One program of an engine: its file, the file of its weights, and its kernel libraries, from best to most portable
    (none on a GPU, where its plan names its kernels). rank: the rank that it is for; 0 if it runs alone. Programs of
    ranks have the names from `rank_program`, share steps and kernels, and each has its own weights. is_stage: whether
    the ranks are stages of a pipeline: each runs its own steps, and the last one computes the logits; a file then holds
    only the weights of these steps. shared: further files of weights, used by programs of other targets, too. parts:
    how many ranks form one stage together."""

    program: str
    weights: str
    libraries: list[Library] = []
    rank: int = 0
    is_stage: bool = False
    shared: list[str] = []
    parts: int = 1

    @property
    def weight_files(self) -> list[str]:
        """All files of its weights; no weight is in two of them."""
        return [*self.shared, self.weights]


def rank_program(rank: int) -> str:
    """The name of the main program of a rank."""
    return f"{MAIN}/{rank}" if rank else MAIN


def weights_file(rank: int = 0) -> str:
    """The name of the file with the weights of a rank's main program."""
    return f"weights-{rank}.safetensors" if rank else "weights.safetensors"


def delta_file(rank: int = 0) -> str:
    """The name of a delta engine's file with the weights of a rank's main program that differ from its base."""
    return f"delta-{rank}.safetensors" if rank else "delta.safetensors"


class GpuFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a GPU engine requires of its device: the architecture of its objects, and the lowest CUDA version of the
    driver.

    deterministic: whether a request's logits have the same bits whatever else is in its steps.
    """

    arch: str  # "sm_90", "gfx942"
    driver_version: int  # 12080 is 12.8; 0 for HIP
    deterministic: bool = False


class TailLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A layer after the pooling, which the runtime computes in float32: "dense" (weight [N, K], optional bias [N], an
    activation, and with `adds_input` a residual addition of the input, multiplied by the matrix `residual` [N, K] if
    there is one), "layer_norm" (weight and bias [N]), "normalize" (scaled to length 1). Arrays are given by the name of
    a .npy file, "" for none.
    """

    kind: Literal["dense", "layer_norm", "normalize"]
    weight: str = ""
    bias: str = ""
    activation: str = "identity"
    adds_input: bool = False
    residual: str = ""


class EmbeddingFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the hidden states of a prompt's tokens become one vector of `dimension` elements. pooling: the hidden state
    of the last or the first token; the mean (weightedmean: with weights 1, 2, 3 ..) or the sum divided by the square
    root of the number of tokens; or the maximum of each element. normalize: whether it is then scaled to length 1.

    pooled: whether the program computes the mean itself and returns it in every row. scores: for a pair of texts, the
    vector has one or two numbers, from which a score is made, with "sigmoid" in 0..1; "" for other engines.
    types_input: the program's input for the token types, which mark the two texts of a pair; "" if it has none.
    coded_types: the number of types, in an engine of format 2, which has no such input and takes token v of type t as t
    * vocabulary + v. also: more poolings, whose vectors are appended to the first. tail: layers after that, before the
    scaling. rows: the width of the hidden states if it is not `dimension`; 0 if it is. prompts: texts to put before an
    input, by name; default_prompt: the one used by default. skips_prompt: whether tokens of these prompts are left out
    of the pooling. around: the texts before a query, between it and a document, and after the document; [] if the
    tokenizer joins the two.
    """

    pooling: Pooling
    normalize: bool
    dimension: int
    pooled: bool = False
    scores: Literal["", "sigmoid", "identity"] = ""
    types_input: str = ""
    coded_types: int = 0
    also: list[Pooling] = []
    tail: list[TailLayer] = []
    rows: int = 0
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    skips_prompt: bool = False
    around: list[str] = []

    @property
    def row_width(self) -> int:
        """The width of the program's output rows, in elements."""
        return self.rows or self.dimension


class EvictionFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A KV cache that does not keep all tokens that the model reads. policy: as in --kv-policy. tokens: the most tokens
    of a sequence that these layers keep. loses: a text that says what is lost."""

    policy: str
    tokens: int
    loses: str
    lossy: bool = True


class GateFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much worse the engine, with its kernels, is than the original model, measured at the compile.

    asked: the conditions of --gate. text: the file of the test text, or "bundled". tokens: its length.
    perplexity_increase: relative to the reference. kl: mean Kullback-Leibler divergence per token, in nats.
    """

    asked: list[str]
    text: str
    tokens: int
    reference_perplexity: float
    perplexity: float
    perplexity_increase: float
    kl: float


class BaseEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of a delta engine: it holds the program, the kernels, and the weights that are equal.

    digest: of its engine.json. path: relative to the delta's directory; absolute once the base was found. weights: the
    file of the delta's own weights for the main program; see `delta_file` for those of other ranks. shared: the files
    that are taken from the base, once it was found.
    """

    digest: str
    path: str
    weights: str
    shared: list[str] = []


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """engine.json. Paths are relative to the engine directory. programs: by name, MAIN among them."""

    format_version: int
    icc_version: str
    target: str
    backend: str  # "cpu", "cuda", "hip"
    model: ModelFacts
    quantization: QuantFacts
    limits: Limits
    sampling: SamplingDefaults
    programs: dict[str, ProgramEntry]
    tokenizer_dir: str | None
    files: dict[str, FileEntry]
    gpu: GpuFacts | None = None
    embedding: EmbeddingFacts | None = None  # None for an engine that generates
    gate: GateFacts | None = None  # None if no --gate was given
    eviction: EvictionFacts | None = None  # None if the cache keeps all tokens that are read
    canaries_file: str | None = None  # see canaries.py; None if the engine has none
    kernel_abi: int = 0  # see KERNEL_ABI; 0 in older engines, which do not state it
    base: BaseEngine | None = None  # None if it is no delta engine
    digest: str = ""  # seals this file itself, see digest.py; "" if it is not sealed

    @property
    def main(self) -> ProgramEntry:
        """The program that every engine has."""
        return self.programs[MAIN]

    @property
    def ranks(self) -> int:
        """How many processes run the main program together; 1 if it runs alone."""
        return next(rank for rank in range(1, len(self.programs) + 1) if rank_program(rank) not in self.programs)

    def weight_files(self, program: str = MAIN) -> list[str]:
        """The files of a program's weights; a weight in a later file replaces one in an earlier file."""
        own = self.programs[program]
        if self.base is None:
            return own.weight_files
        return [*own.weight_files, delta_file(own.rank) if own.rank else self.base.weights]

    @property
    def all_weights(self) -> set[str]:
        """The files of the weights of all programs."""
        return {file for name in self.programs for file in self.weight_files(name)}

    def program(self, name: str, alone: bool = True) -> ProgramEntry:
        """The program of that name. EngineFormatError if there is none, or if `alone` and it only runs together with
        others."""
        entry = self.programs.get(name)
        if entry is None:
            raise EngineFormatError(
                f"the engine has no program {name!r}", f"it has: {', '.join(sorted(self.programs))}"
            )
        if alone and entry.rank:
            raise EngineFormatError(
                f"program {name!r} is for rank {entry.rank} of several, and does not run alone",
                "open the program of rank 0, which starts the others",
            )
        return entry

    @property
    def tokenizer_names(self) -> list[str]:
        """The files of the tokenizer, relative to its directory."""
        start = f"{self.tokenizer_dir}/"
        return [name.removeprefix(start) for name in self.files if name.startswith(start)]
