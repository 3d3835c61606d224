"""Steps of layers with a recurrent state."""

from __future__ import annotations

from typing import ClassVar

from ....runtime.format.operands import Operand
from .base import Step, step_type

MAX_CHUNK = 16  # the most decays of a chunk's tokens that a state holds


def words(elements: int, rounded: bool) -> int:
    """How many words of 4 bytes hold `elements` numbers: of bf16 if they are rounded, else of float32."""
    return -(-elements // 2) if rounded else elements


class StateStep(Step, frozen=True, kw_only=True):
    """A step that continues from the state that its layer keeps of each sequence, in blocks of `block_size` tokens."""

    block_size: int

    @property
    def state(self) -> int:
        """Words of the state, of 4 bytes: a float32 each, or two of bf16."""
        raise NotImplementedError


@step_type
class CausalConv(StateStep, frozen=True, kw_only=True, tag="causal_conv"):
    """y [channels] from x [channels] of this and earlier tokens: see compiler/ops/convolution.py. w: [taps, channels].

    The state is the last taps - 1 inputs, [taps - 1, channels], the oldest first.
    """

    OUTPUTS: ClassVar = ("y",)
    x: Operand
    w: Operand
    bias: Operand | None = None
    y: Operand
    channels: int
    taps: int

    @property
    def state(self) -> int:
        return (self.taps - 1) * self.channels

    def widths(self) -> dict[str, int]:
        return {**dict.fromkeys(("x", "bias", "y"), self.channels), "w": self.taps * self.channels}

    def problem(self) -> str:
        return "" if self.taps > 1 else f"a convolution of {self.taps} taps has no state"


@step_type
class GatedScan(StateStep, frozen=True, kw_only=True, tag="gated_scan"):
    """o [heads, value_dim] of q, k [shared, key_dim], v [heads, value_dim]: see compiler/ops/scan.py.

    decay [heads] or, with `row_decay`, [heads, key_dim]; beta [heads]. The state of a head is the matrix after the last
    whole chunk of `chunk` tokens, [key_dim, columns], and, for the tokens since then, their keys [chunk, rows], their
    updates [chunk, columns] and their decays. With a chunk of 0 it is only the matrix after the last token, [key_dim,
    value_dim]. rounded: matrices are stored in bf16, everything else in float32.
    """

    OUTPUTS: ClassVar = ("o",)
    q: Operand
    k: Operand
    v: Operand
    decay: Operand
    beta: Operand | None = None
    o: Operand
    heads: int
    shared: int
    key_dim: int
    value_dim: int
    chunk: int
    row_decay: bool = False
    delta: bool = False
    rounded: bool = False

    @property
    def tile(self) -> int:
        """Columns of the matrix that are stored together."""
        return 16 if self.value_dim <= 16 else 32

    @property
    def columns(self) -> int:
        """Columns of the matrix, in whole tiles."""
        return -(-self.value_dim // self.tile) * self.tile

    @property
    def rows_padded(self) -> int:
        """Floats of a key, in whole vectors of 16."""
        return -(-self.key_dim // 16) * 16

    @property
    def matrix(self) -> int:
        """Words of a head's matrix."""
        columns = self.columns if self.chunk else self.value_dim
        return words(self.key_dim * columns, self.rounded)

    @property
    def head_state(self) -> int:
        """Words of a head's state."""
        decays = 16 + (self.rows_padded if self.row_decay else 16)
        return self.matrix + self.chunk * (self.rows_padded + self.columns) + decays

    @property
    def share(self) -> int:
        """Heads that share the same queries and keys."""
        return self.heads // self.shared

    @property
    def state(self) -> int:
        if not self.chunk:
            return words(self.heads * self.key_dim * self.value_dim, self.rounded)
        return self.heads * self.head_state

    def widths(self) -> dict[str, int]:
        keys, values = self.shared * self.key_dim, self.heads * self.value_dim
        decays = self.heads * (self.key_dim if self.row_decay else 1)
        return {"q": keys, "k": keys, "v": values, "decay": decays, "beta": self.heads, "o": values}

    def problem(self) -> str:
        if self.heads % self.shared:
            return f"{self.heads} heads are no multiple of {self.shared}"
        return "" if 0 <= self.chunk <= MAX_CHUNK else f"chunks of {self.chunk} tokens"


@step_type
class SelectiveScan(StateStep, frozen=True, kw_only=True, tag="selective_scan"):
    """y [channels] of x, dt [channels], b, c [states]: see compiler/ops/scan.py. The state is [states, channels].

    rounded: the state is stored in bf16 after every token.
    """

    OUTPUTS: ClassVar = ("y",)
    x: Operand
    dt: Operand
    a: Operand
    b: Operand
    c: Operand
    y: Operand
    channels: int
    states: int
    rounded: bool = False

    @property
    def state(self) -> int:
        return words(self.states * self.channels, self.rounded)

    def widths(self) -> dict[str, int]:
        rows = dict.fromkeys(("x", "dt", "y"), self.channels)
        return {**rows, **dict.fromkeys(("b", "c"), self.states), "a": self.states * self.channels}


@step_type
class ChannelScan(StateStep, frozen=True, kw_only=True, tag="channel_scan"):
    """y [channels] of x, decay [channels]: see compiler/ops/scan.py. The state is [channels]."""

    OUTPUTS: ClassVar = ("y",)
    x: Operand
    decay: Operand | None = None
    y: Operand
    channels: int
    maximum: bool = False
    start: float = 0.0

    @property
    def state(self) -> int:
        return self.channels

    def widths(self) -> dict[str, int]:
        return dict.fromkeys(("x", "decay", "y"), self.channels)
