"""Errors of icc: one class per cause, with the facts as fields, a message of one line, a hint and an exit code."""

from __future__ import annotations

from collections.abc import Sequence


def install(extra: str) -> str:
    """A hint for a missing library: how to install the package's extra that contains it."""
    return f"pip install 'icc-llm[{extra}]'"


def bounds(low: float, high: float) -> str:
    """The range that a number must be in, in words. Integers are written in full, because nobody could type
    1.84467e+19."""
    return " to ".join(f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (low, high))


class IccError(Exception):
    """The base class of every error that icc raises on purpose.

    `exit_code` is what the command line returns, `hint` says what the user can do about the error.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckpointError(IccError):
    """A checkpoint cannot be read: no config.json, a missing or truncated shard, a damaged GGUF file, pickles."""

    exit_code = 10


class EngineFormatError(IccError):
    """The engine directory is damaged, changed, incomplete or of another format version."""

    exit_code = 20


class EngineVersionError(EngineFormatError):
    """The engine was written in a format version that this runtime does not read."""

    exit_code = 21

    def __init__(self, found: object, supported: Sequence[int]) -> None:
        known = " and ".join(map(str, supported))
        super().__init__(
            f"engine format version {found!r} is not supported: this runtime reads version {known}",
            "compile the model again with this version of icc, or install the icc version that wrote the engine",
        )
        self.found = found
        self.supported = supported


class EngineFieldError(EngineFormatError):
    """A field of the engine's description is missing, unknown (of a later icc), or of another type."""

    exit_code = 29


class EngineChangedError(EngineFormatError):
    """A file of the engine (tokenizer, weights, kernels) was changed since the engine was written."""

    exit_code = 32


class SignatureError(IccError):
    """The engine is not signed by the requested key, or was changed after it was signed."""

    exit_code = 50


class EngineAbiError(EngineFormatError):
    """The engine's kernels have another interface than this runtime calls."""

    exit_code = 26

    def __init__(self, name: str, found: int, supported: int) -> None:
        super().__init__(
            f"{name} has kernel interface version {found}, this runtime needs {supported}",
            "compile the model again with this version of icc, or install the icc version that wrote the engine",
        )


class KVLayoutError(EngineFormatError):
    """The engine's KV cache has a block size or a number type that this runtime does not support."""

    exit_code = 28


class MissingIsaError(IccError):
    """The machine has none of the instruction sets that the engine was compiled for."""

    exit_code = 22


class CapacityError(IccError):
    """A request or a batch needs more memory (KV blocks, tokens, sequences) than the engine has."""

    exit_code = 23


class RequestError(IccError):
    """One request is invalid: its parameters, token ids or length. `field` names the parameter, if it is one."""

    exit_code = 24

    def __init__(self, message: str, hint: str = "", field: str = "") -> None:
        super().__init__(message, hint)
        self.field = field


class AdapterError(IccError):
    """An adapter cannot be read, is damaged, or is of a kind that icc does not support."""

    exit_code = 48


class BusyError(IccError):
    """A process that the server needs did not start in time, because the machine is busy; a retry may succeed."""

    exit_code = 47


class UsageError(IccError):
    """An argument of a command or an API call is invalid."""

    exit_code = 2


class MissingExtraError(IccError):
    """A command needs libraries that an extra of the package installs."""

    exit_code = 3


class DeviceError(IccError):
    """The GPU, its driver or its Python bindings are missing, do not fit the engine, or failed."""

    exit_code = 25


class DriverError(DeviceError):
    """The GPU's driver is older than the engine needs."""

    exit_code = 27


class BatchFailed(IccError):
    """A batch has been processed, and some of its requests got an error instead of an answer."""

    exit_code = 42

    def __init__(self, failed: int, requests: int, output: str) -> None:
        super().__init__(f"{failed} of {requests} requests failed", f"their lines in {output} say why")
        self.failed, self.requests = failed, requests


class WrongAnswersError(IccError):
    """The engine's kernels answer its canary prompts differently than the reference did at the compile: on this machine
    they are wrong. `prompt`: the canary's index. `how`: what each step ran, whole prompts or single tokens."""

    exit_code = 46

    def __init__(self, prompt: int, how: str, found: float, allowed: float) -> None:
        super().__init__(
            f"the engine gives wrong answers on this machine: canary prompt {prompt}, in steps of {how}, "
            f"is off by {found:.3g}, and {allowed:.3g} is allowed",
            "another kernel library may be right (--isa, see icc inspect); else compile the model again here",
        )
        self.prompt, self.how, self.found, self.allowed = prompt, how, found, allowed


class ExtensionError(IccError):
    """An extension that another package registers through an entry point cannot be loaded, or is of the wrong type."""

    exit_code = 34
