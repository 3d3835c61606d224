"""engine.json: the typed, versioned, closed description of an engine directory. The runtime owns the format."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import EngineFormatError
from ..system import LINUX

FORMAT_VERSION = 3  # 3: programs by name, sections that say what they are given and give; 2: typed steps
READ_VERSIONS = (2, FORMAT_VERSION)  # see version2.py
MAIN = "main"  # the program that every engine has
# Version of what kernels, program and runtime agree on, by backend: for "cpu" ICC_ABI_VERSION of abi.h, for GPUs the
# arguments of a launch and the meaning of the plan. The manifest states it, so that no other file is read to tell.
KERNEL_ABI = {"cpu": 6, "cuda": 2, "hip": 2}

PIECE = 4 << 20  # bytes; part of the format

TEMPLATE_DIR = "additional_chat_templates"  # of a tokenizer: templates besides its own, as transformers saves them

# which hidden states of a prompt make its vector, and how
Pooling = Literal["last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len"]
POOLED_ROWS = ("mean", "max", "weightedmean", "mean_sqrt_len")  # those to which every token counts


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Size in bytes and sha256 (hex) of one file of the engine.

    A file of more than PIECE bytes also has the digest of each PIECE of it: they are what is compared when an engine is
    opened, because threads can share that work. hash: which digest, BLAKE3 where the engine's own library makes it.
    """

    size: int
    sha256: str
    pieces: list[str] = []
    hash: Literal["sha256", "blake3"] = "sha256"


class ModelFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the runtime must know of the model. `architecture` is for people only; nothing branches on it.

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
    """How weights are stored. `bits_per_weight` counts scales and zero points, over all parameters."""

    method: str
    bits_per_weight: float
    kept: list[str]  # linears left unquantized, "name: reason"


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Static limits: sequence length, sequences per step and tokens per step."""

    max_seq_len: int
    max_batch_size: int
    max_step_tokens: int


# inclusive bounds of these, of a checkpoint as of a request
SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


class SamplingDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """generation_config.json of the checkpoint, as far as it concerns sampling. None: greedy (of `generate` and of
    `icc run`; see `of_conversations`), or off."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def of_conversations(self) -> SamplingDefaults:
        """What the server and conversations use where a request says nothing: the model's own, and temperature 1.0
        where it has none, as OpenAI's API has it."""
        return self if self.temperature is not None else msgspec.structs.replace(self, temperature=1.0)

    def of_terminals(self) -> SamplingDefaults:
        """What `icc chat` uses: the model's own, and what llama.cpp and Ollama use where it has no temperature. At 1.0
        small models make up words; people in front of a terminal expect what those two give them."""
        if self.temperature is not None:
            return self
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return SamplingDefaults(**{"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, **given})


class Library(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One compiled kernel library. `isa` is a level name; `cpu_flags` are the /proc/cpuinfo flags that it needs.
    system: the operating system that it is for, one of system.SYSTEMS."""

    isa: str
    path: str
    cpu_flags: list[str]
    system: str = LINUX

    @property
    def title(self) -> str:
        """The level, and the system where that is not Linux."""
        return self.isa if self.system == LINUX else f"{self.isa}-{self.system}"


class ProgramEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One program of an engine: its file, the file of its weights, and its kernel libraries, from best to most portable
    (none on a GPU, where its plan names its kernels). rank: which of those that run together it is for; 0 of one that
    runs alone. Programs of ranks are called as `rank_program` says, share steps and kernels, and have weights each.
    is_stage: whether ranks work one after the other, each on steps of its own, the last of which gives the logits; a
    file then has the weights of these steps alone. shared: further files of weights, which programs of other targets
    have, too. parts: how many ranks are one such stage together, if not one."""

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
    """The file of the weights of a rank's main program."""
    return f"weights-{rank}.safetensors" if rank else "weights.safetensors"


def delta_file(rank: int = 0) -> str:
    """The file of the weights of a rank's main program that a delta has in place of its base's."""
    return f"delta-{rank}.safetensors" if rank else "delta.safetensors"


class GpuFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a GPU engine needs of its device: the architecture of its objects, and the driver's least CUDA version.

    deterministic: whether a request's logits have the same bits whatever else is in its steps.
    """

    arch: str  # "sm_90", "gfx942"
    driver_version: int  # 12080 is 12.8; 0 for HIP
    deterministic: bool = False


class TailLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A layer behind the pooling that the runtime computes in float32: "dense" (weight [N, K], perhaps a bias [N], a
    function of the result, and what it was made of added again, through a matrix [N, K] where that stands in residual),
    "layer_norm" (weight and bias [N]), "normalize" (scaled to length 1). What is an array is the name of a .npy file.
    """

    kind: Literal["dense", "layer_norm", "normalize"]
    weight: str = ""
    bias: str = ""
    activation: str = "identity"
    adds_input: bool = False
    residual: str = ""


class EmbeddingFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the hidden states of a prompt's tokens become one vector of `dimension`: that of its last or its first
    token; their mean, with weights 1, 2, 3 .. if weighted, or their sum over the root of their number; or the maximum
    of each element. Then scaled to length 1, or not.

    pooled: the program has taken the mean itself, and gives it with any row. scores: the vector has one number or two
    for a pair of texts, of which a score is made, by "sigmoid" one within 0..1. types_input: the input of the program
    that takes the types of a pair's tokens, which tell its texts apart; "" if it has none. coded_types: of an engine
    of format 2, which has no such input, how many types there are: it takes token v of type t as t * vocabulary + v.
    also: more ways of pooling, whose vectors come behind the first. tail: layers behind that, before the scaling. rows:
    how wide hidden states are where a vector is not (0: it is). prompts: texts that come before another, by their
    names; default_prompt: the one where nothing is said. skips_prompt: their tokens are not pooled.
    around: what comes before a query, between it and a document, and behind; [] if the tokenizer joins the two.
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
    """The KV cache does not keep all that the model reads: `policy` as --kv-policy has it, the most `tokens` of a
    sequence that it holds in these layers, and what is lost by that, in words."""

    policy: str
    tokens: int
    loses: str
    lossy: bool = True


class GateFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the engine, kernels included, loses against the model that it was made of, measured when it was compiled.

    asked: the conditions that it had to keep, as --gate has them. text: the file, or "bundled". perplexity: relative
    increase. kl: mean Kullback-Leibler divergence per token, in nats.
    """

    asked: list[str]
    text: str
    tokens: int
    reference_perplexity: float
    perplexity: float
    perplexity_increase: float
    kl: float


class BaseEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The engine that has what a delta engine has not: its program, kernels, and the weights that are equal.

    digest: of its engine.json. path: relative to the delta's directory; absolute once it was found. weights: the file
    of the delta's own weights, for the main program; those of other ranks are called as `delta_file` says. shared: the
    files that are taken from there, once it was found.
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
    embedding: EmbeddingFacts | None = None  # of an engine that embeds; None of one that generates
    gate: GateFacts | None = None  # None where no --gate was given
    eviction: EvictionFacts | None = None  # None where nothing that is read is given up
    canaries_file: str | None = None  # see canaries.py; None where the engine has none
    kernel_abi: int = 0  # see KERNEL_ABI; 0 where it was not stated yet
    base: BaseEngine | None = None  # of a delta engine; None of one that has all it needs
    digest: str = ""  # seals this file itself, see engine/digest.py; "" if it is not sealed

    @property
    def main(self) -> ProgramEntry:
        """The program that every engine has."""
        return self.programs[MAIN]

    @property
    def ranks(self) -> int:
        """How many processes run the main program together; 1 where it runs alone."""
        return next(rank for rank in range(1, len(self.programs) + 1) if rank_program(rank) not in self.programs)

    def weight_files(self, program: str = MAIN) -> list[str]:
        """The files of a program's weights: a weight of a later one takes the place of an earlier one's."""
        own = self.programs[program]
        if self.base is None:
            return own.weight_files
        return [*own.weight_files, delta_file(own.rank) if own.rank else self.base.weights]

    @property
    def all_weights(self) -> set[str]:
        """The files of the weights of all programs."""
        return {file for name in self.programs for file in self.weight_files(name)}

    def program(self, name: str, alone: bool = True) -> ProgramEntry:
        """The program of that name. EngineFormatError if there is none, or it runs only beside others and is asked for
        `alone`."""
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
