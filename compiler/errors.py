"""Errors of the compile side. Each cause has its own class and exit code; see runtime/errors.py for the base."""

from __future__ import annotations

from ..runtime.errors import CheckpointError, ExtensionError, IccError, UsageError

__all__ = [
    "CheckpointError",
    "ExportError",
    "ExtensionError",
    "GateError",
    "GraphTextError",
    "HeadMismatch",
    "HubError",
    "IccError",
    "MismatchError",
    "OutOfMemory",
    "OutputExistsError",
    "PassError",
    "RebuildError",
    "SequenceLengthError",
    "TensorError",
    "TraceError",
    "UnsupportedModel",
    "UsageError",
    "VerifyError",
    "WriteError",
]


class TensorError(IccError):
    """A tensor of the checkpoint is missing, misshapen or holds NaN or Inf. `tensor` is its name, `problem` says which
    of these."""

    exit_code = 11

    def __init__(self, tensor: str, problem: str, hint: str = "") -> None:
        super().__init__(f"tensor {tensor!r}: {problem}", hint)
        self.tensor, self.problem = tensor, problem


class UnsupportedModel(IccError):
    """The model is not a causal decoder that icc can compile. `op` and `module` say where, if it is one operation."""

    exit_code = 12

    def __init__(self, message: str, hint: str = "", op: str = "", module: str = "") -> None:
        super().__init__(message, hint)
        self.op = op
        self.module = module


class TraceError(UnsupportedModel):
    """`torch.export` could not trace the model."""

    exit_code = 13


class SequenceLengthError(IccError):
    """`--max-seq-len` is above what the model's positions allow."""

    exit_code = 14


class OutputExistsError(IccError):
    """The output directory exists and --force was not given."""

    exit_code = 15


class WriteError(IccError):
    """The engine could not be written: disk full, no permission, file too large."""

    exit_code = 16


class PassError(IccError):
    """A pass failed: an icc bug, or an option that does not fit the model."""

    exit_code = 17


class VerifyError(PassError):
    """The graph, or the program it was lowered to, breaks a rule of its stage after `pass_name`."""

    exit_code = 18

    def __init__(self, stage: str, pass_name: str, node: str, problem: str) -> None:
        what = "program" if stage == "lowered" else "graph"
        super().__init__(f"after pass {pass_name!r} the {what} is not a valid {stage} {what}: {node}: {problem}")
        self.stage = stage
        self.pass_name = pass_name
        self.node = node
        self.problem = problem


class ExportError(IccError):
    """A graph holds an op or value that ONNX cannot express."""

    exit_code = 35


class GraphTextError(IccError):
    """A line of graph text cannot be read, or states something untrue. `line` is its number."""

    exit_code = 33

    def __init__(self, line: int, text: str, problem: str) -> None:
        super().__init__(f"line {line} of the graph: {problem}", text)
        self.line = line


class HeadMismatch(IccError):
    """Medusa heads were made for another model. `tensor` says where, `what` is "hidden size" or "vocabulary"."""

    exit_code = 19

    def __init__(self, tensor: str, what: str, found: int, wanted: int) -> None:
        super().__init__(
            f"the Medusa heads do not fit the model: {tensor} has {what} {found}, the model has {wanted}",
            "train heads for this model with `icc train-heads`",
        )
        self.tensor = tensor
        self.what = what


class HubError(IccError):
    """A model cannot be loaded from the Hugging Face hub: no network, no such name, no permission."""

    exit_code = 40


class OutOfMemory(IccError):
    """The machine does not have the memory that a stage of the compile needs. `stage` is its name."""

    exit_code = 41

    def __init__(self, stage: str, reason: str = "") -> None:
        detail = f": {reason}" if reason else ""
        super().__init__(
            f"out of memory while compiling ({stage}){detail}",
            "free memory, or compile on a machine that has more: `icc plan MODEL` says what a compile takes",
        )
        self.stage = stage


class RebuildError(IccError):
    """A compile from the recorded sources of an engine gives another engine."""

    exit_code = 51


class MismatchError(IccError):
    """A checkpoint does not fit the engine whose program and kernels it is to be run with."""

    exit_code = 49


class GateError(IccError):
    """The engine does not keep what --gate asks for. `metric` is "ppl" or "kl", `found` and `limit` its values."""

    exit_code = 45

    def __init__(self, metric: str, found: float, limit: float, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.metric, self.found, self.limit = metric, found, limit
