"""LoadOptions: how an engine is loaded; shared by `icc.load`, all commands, the server and its engine process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from typing import TYPE_CHECKING

from .errors import UsageError
from .executor.cpu.cores import read_cores
from .settings import setting
from .speculate.modes import LOSSLESS

if TYPE_CHECKING:
    from .speculate.typical import TypicalAcceptance


@dataclass(frozen=True)
class LoadOptions:
    """An engine and how to load it. UsageError if a value is invalid for every engine.

    threads: how many run kernels (default: one per physical core that this process may use). cores: for a CPU engine,
    the cores to which kernel threads, and threads that run requests, are pinned until the engine is closed, such as
    "0-7,8". device: for a GPU engine, the number of the GPU (default: 0). target: the target to load, if the engine has
    several (default: that of this machine's GPU, else of its CPU; with `device`, that of this GPU). isa: the name of
    the kernel library to use instead of the best for this machine. verify: compare every file with its sha256 first.
    require_signature: a public key by which the engine, and a drafter's engine, must be signed; SignatureError if not.
    verify_answers: run the canary prompts first, and raise WrongAnswersError if the kernels are wrong on this machine;
    `icc serve` always does. kv_bytes: memory for the KV cache (default: a full batch of full sequences, within 40 % of
    the available memory). swap_bytes: for a GPU engine, host memory for the KV of preempted requests (default: 4 GiB if
    its cache can run out, within 25 % of the available memory; 0: it is computed again). spec: the drafter of
    speculative decoding, "none", "mtp", "eagle", "assistant", "dflash", "medusa", "ngram", "suffix", "lookahead",
    "lookahead:W,N,G", "layer-skip", "uno:DIR", "draft" or "draft:ENGINE" (default: what the engine was compiled for);
    it changes no output, unless spec_accept is "typical", which is lossy: sampled requests then accept guesses that are
    probable enough (Cai et al. 2024; "typical:EPSILON,DELTA" for other bounds than 0.09,0.3). adapters: those to load
    with the engine, directories or files by the name that requests use; see `LLM.load_adapter`.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    threads: int | None = setting(None, "Kernel threads.", unset="physical cores", needs="cpu")
    cores: str | None = setting(
        None,
        "Cores to pin kernel threads to: 0-7,8.",
        metavar="CORES",
        unset="all that the process may use",
        needs="cpu",
    )
    device: int | None = setting(None, "GPU to run on, by its number.", metavar="N", unset="0", needs="gpu")
    target: str | None = setting(
        None,
        "Which target, of an engine of several.",
        metavar="TARGET",
        unset="what this machine has",
        needs="targets",
    )
    isa: str | None = setting(
        None, "Kernel library to use instead of the best one; also ICC_ISA.", unset="the best for this CPU", needs="cpu"
    )
    verify: bool = setting(True, "Compare every file with its hash first.")
    require_signature: str | None = setting(
        None, "Refuse an engine that is not signed by this key: a file, or the key itself.", metavar="PUBLIC_KEY"
    )
    verify_answers: bool = setting(False, "First check the kernels on this machine with the engine's canary prompts.")
    kv_bytes: int | None = setting(
        None,
        "Memory for the KV cache in MiB.",
        names="--kv-mib",
        metavar="MIB",
        unit=1 << 20,
        unset="a full batch, at most 40 % of RAM",
    )
    swap_bytes: int | None = setting(
        None,
        "Host memory in GiB for the KV of preempted requests; 0: it is computed again.",
        names="--swap-gib",
        metavar="GIB",
        unit=1 << 30,
        unset="if the cache can run out, 4, at most 25 % of RAM",
        needs="gpu",
    )
    spec: str | None = setting(
        None,
        "Drafter of speculative decoding.",
        values=lambda: {
            "none": "no speculation",
            "mtp": "the layer that predicts further tokens, of an engine compiled with it",
            "eagle": "the EAGLE-3 drafter, of an engine compiled with it",
            "assistant": "the assistant that reads the model's keys and values, of an engine compiled with it",
            "dflash": "the DFlash drafter, of an engine compiled with it",
            "medusa": "draft heads, of an engine compiled with them",
            "layer-skip": "the first layers, of an engine compiled so",
            "ngram": "what followed the same tokens before",
            "suffix": "what most often followed them, in past answers too",
            "lookahead[:W,N,G]": "n-grams that the model finds meanwhile, by default 7,5,7",
            "uno:DIR": "the model with this adapter (UNO), of an engine with --adapters",
            "draft": "a smaller program of the engine, where it has one",
            "draft:ENGINE": "a smaller engine",
        },
        open=True,
        unset="as compiled",
        needs="generate",
    )
    spec_accept: str = setting(
        LOSSLESS,
        "Which guesses are kept.",
        metavar="HOW",
        values=lambda: {
            LOSSLESS: "those that the model would have sampled",
            "typical[:EPSILON,DELTA]": "lossy: sampled requests keep guesses more probable than min(EPSILON, "
            "DELTA / exp(entropy)), by default 0.09,0.3",
        },
        open=True,
        needs="generate",
    )
    adapters: Mapping[str, str | os.PathLike[str]] | None = None  # commands have --lora

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))
        if self.adapters is not None:
            object.__setattr__(self, "adapters", _paths(self.adapters))
        for name, least in (("threads", 1), ("device", 0), ("kv_bytes", 0), ("swap_bytes", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise UsageError(f"{name} = {value!r}: must be an integer, at least {least}")
        flags = (("verify", bool), ("verify_answers", bool))
        for name, kind in (
            ("target", str | None),
            ("isa", str | None),
            ("cores", str | None),
            ("spec", str | None),
            ("require_signature", str | None),
            ("spec_accept", str),
            *flags,
        ):
            if not isinstance(getattr(self, name), kind):
                raise UsageError(f"{name} = {getattr(self, name)!r}: must be {getattr(kind, '__name__', kind)}")
        if self.require_signature is not None and not self.verify:
            raise UsageError("a signature needs files that are verified", "leave out --no-verify, verify=False")
        _ = self.acceptance, self.core_set

    @property
    def core_set(self) -> frozenset[int] | None:
        """The cores to which kernel threads are pinned; None: see `preferred_cores`."""
        return None if self.cores is None else read_cores(self.cores)

    @property
    def acceptance(self) -> TypicalAcceptance | None:
        """How guesses are accepted; None: losslessly."""
        if self.spec_accept == LOSSLESS:
            return None
        from .speculate.typical import read_acceptance  # needs numpy, which parsing a command must not import

        return read_acceptance(self.spec_accept)

    def to_json(self) -> str:
        """The options as a JSON text, to pass to a process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LoadOptions:
        """The options from a text of `to_json`."""
        return cls(**json.loads(text))


def _paths(adapters: object) -> dict[str, str]:
    """Check adapters: paths by name. UsageError if they are anything else."""
    if isinstance(adapters, Mapping) and all(
        isinstance(name, str) and isinstance(path, str | os.PathLike) for name, path in adapters.items()
    ):
        return {name: os.fspath(path) for name, path in adapters.items()}
    raise UsageError(f"adapters = {adapters!r}: must be a mapping of names to directories")
