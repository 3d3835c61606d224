"""The KV write and paged attention."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from ....runtime.format.kv import KVLayer
from ....runtime.format.operands import Operand
from .base import OperandGroup, Step, step_type


class CacheStep(Step, frozen=True, kw_only=True):
    """A step that reads or writes the cache of a layer, in blocks of `block_size` tokens. cache: the name of the KV
    format."""

    kv: KVLayer
    cache: str
    block_size: int


class Rotary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How keys or queries are rotated: their first `dim` elements (0: no rotation), by tables of `rows` positions."""

    dim: int = 0
    rows: int = 0
    style: Literal["half", "interleaved"] = "half"

    @property
    def size(self) -> int:
        """Elements of a table."""
        return self.dim * self.rows

    def problem(self, kv: KVLayer) -> str:
        """Why keys of that width cannot be rotated like this; "" if they can."""
        if self.dim % 2 or self.dim > kv.key_dim:
            return f"rotary_dim {self.dim} must be even and at most key_dim {kv.key_dim}"
        return ""


@step_type
class KvWrite(CacheStep, frozen=True, kw_only=True, tag="kv_write"):
    """Moves accepted drafts, then stores rotated k [heads, key_dim] and v [heads, value_dim] at slot_mapping; v is None
    if values are the beginning of keys."""

    OUTPUTS: ClassVar = ()
    k: Operand
    v: Operand | None = None
    cos: Operand | None = None
    sin: Operand | None = None
    rotary: Rotary = Rotary()

    def widths(self) -> dict[str, int]:
        keys, values = self.kv.kv_heads * self.kv.key_dim, self.kv.kv_heads * self.kv.value_dim
        return {"k": keys, "v": values, **dict.fromkeys(("cos", "sin"), self.rotary.size)}

    def problem(self) -> str:
        if (self.v is None) != self.kv.shared:
            return "values are stored, or they are the beginning of keys"
        if self.kv.shared and self.kv.value_dim > self.kv.key_dim:
            return f"values of {self.kv.value_dim} dims are no beginning of keys of {self.kv.key_dim}"
        return self.rotary.problem(self.kv)


class NewKeys(OperandGroup, frozen=True, tag="new_keys"):
    """Keys and values of a step's tokens, with the operands of `KvWrite`."""

    k: Operand
    v: Operand | None = None
    cos: Operand | None = None
    sin: Operand | None = None


@step_type
class Attention(CacheStep, frozen=True, kw_only=True, tag="attention"):
    """o [q_heads, value_dim] of rotated q [q_heads, key_dim] over the cache: see compiler/ops/attention.py.

    new: keys and values that are written to the cache before it is read, rotated by new_rotary; None if a KvWrite has
    done so. row_bias [q_heads, row_bias_width], or one row for all heads if `row_bias_shared`: added by the distance of
    a key from its query; column 0 is the key `later` positions after the query. key_bias [q_heads, key_bias_width],
    key_later: the same for each key. front: how many of the first tokens are seen in addition to the window, with
    positions as if right before it (StreamingLLM). evicts: how the tokens to drop are chosen, see compiler/eviction.py;
    `budget` and `recent` are the policy's sizes.
    """

    OUTPUTS: ClassVar = ("o",)
    q: Operand
    cos: Operand | None = None
    sin: Operand | None = None
    sinks: Operand | None = None
    alibi: Operand | None = None
    bias: Operand | None = None
    row_bias: Operand | None = None
    key_bias: Operand | None = None
    new: NewKeys | None = None
    o: Operand
    rotary: Rotary = Rotary()
    new_rotary: Rotary = Rotary()
    q_heads: int
    scale: float
    window: int = 0
    front: int = 0
    chunk: int = 0
    softcap: float = 0.0
    ahead: int = 0
    bias_width: int = 0
    row_bias_width: int = 0
    row_bias_shared: bool = False
    later: int = 0
    key_bias_width: int = 0
    key_later: int = 0
    evicts: Literal["", "h2o", "snapkv"] = ""
    budget: int = 0
    recent: int = 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv.kv_heads

    def widths(self) -> dict[str, int]:
        rows = {"q": self.q_heads * self.kv.key_dim, "o": self.q_heads * self.kv.value_dim}
        heads = dict.fromkeys(("sinks", "alibi"), self.q_heads)
        tables = dict.fromkeys(("cos", "sin"), self.rotary.size)
        written = self.write.widths() if self.write else {}
        new = {f"new.{name}": width for name, width in written.items()}
        by_row = self.row_bias_width if self.row_bias_shared else self.q_heads * self.row_bias_width
        by_key = self.q_heads * self.key_bias_width
        biases = {"bias": self.q_heads * self.bias_width, "row_bias": by_row, "key_bias": by_key}
        return {**rows, **heads, **tables, **new, **biases}

    @property
    def adds(self) -> bool:
        """Whether something is added to scores."""
        return any(added is not None for added in (self.alibi, self.bias, self.row_bias, self.key_bias))

    @property
    def row_bias_apart(self) -> int:
        """Elements from the row of one query head to that of the next."""
        return 0 if self.row_bias_shared else self.row_bias_width

    @property
    def write(self) -> KvWrite | None:
        """The write of new keys and values as a separate step; None if `new` is None."""
        new = self.new
        if new is None:
            return None
        return KvWrite(
            kernel=self.kernel, layer=self.layer, kv=self.kv, cache=self.cache, block_size=self.block_size,
            rotary=self.new_rotary, k=new.k, v=new.v, cos=new.cos, sin=new.sin,
        )  # fmt: skip

    def problem(self) -> str:
        if self.write and (reason := self.write.problem()):
            return reason
        if self.q_heads % self.kv.kv_heads:
            return f"{self.q_heads} query heads are no multiple of {self.kv.kv_heads} KV heads"
        if bool(self.evicts) != self.kv.scored:
            return "what evicts has scores to choose by"
        if self.evicts and (self.window or self.chunk or self.ahead or self.alibi or self.bias):
            return "tokens are chosen of all that came before, and nothing else tells their places"
        if self.row_bias and (self.evicts or self.front):
            return "what a query adds by distance asks for keys at their own positions"
        if self.key_bias and not self.ahead:
            return "what a key adds by distance asks for all keys in one step"
        if self.front and (not self.window or self.chunk or self.ahead):
            return "first tokens are kept beside a window, of tokens that see no later ones"
        return self.rotary.problem(self.kv)


@step_type
class ChooseKeys(CacheStep, frozen=True, kw_only=True, tag="choose_keys"):
    """o [width] of q [heads, key_dim] and w [heads] over the cached keys of an index: see compiler/ops/selecting.py."""

    OUTPUTS: ClassVar = ("o",)
    q: Operand
    w: Operand
    o: Operand
    heads: int
    count: int
    width: int

    def widths(self) -> dict[str, int]:
        return {"q": self.heads * self.kv.key_dim, "w": self.heads, "o": self.width}

    def problem(self) -> str:
        if self.kv.kv_heads != 1 or not self.kv.shared or self.kv.scored:
            return "an index has one key of a token, and nothing else"
        return "" if 0 < self.count else f"a choice of {self.count} keys"
