"""What an engine with room for adapters says of that room: its pools, and which module's adapter goes where."""

from __future__ import annotations

import msgspec

from .batch import BatchArray

ADAPTER = BatchArray("adapter", ("T",), fill=-1)  # the slot of the adapter of a token's row, -1 for none
MAX_RANK = 256
DORA = "+dora"
ADAPTER_SECTION = "adapters"  # the section that runs where a row of a batch has one


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One weight of a program that is written at run time, `slots` parts of equal size: of each, matrices [n, k].

    The file of weights has no bytes of it; it begins as zeros. Elements of type `dtype` lie in rows, or, where `tile`
    is more than 1, in tiles of so many rows: [n / tile, k, tile], the last tile filled up with zeros. first: how many
    parts of that size lie before those of the slots, and stay zeros.

    cuts: by rank, its ranges of the axis `axis` of all matrices [matrices, n, k], where ranks have parts, of which
    matrices, n and k are the sizes then; nothing of a rank whose part stays zeros. Empty where all have the same.
    """

    weight: str
    slots: int
    matrices: int  # per slot: 1, or one for each expert
    n: int
    k: int
    dtype: str
    tile: int = 1
    first: int = 0
    axis: int = 0
    cuts: list[list[tuple[int, int]]] = []


class AdapterSite(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the low-rank change of one weight of the model goes: y += B (A x).

    parameter: the weight's name in the checkpoint, [n, k], or [experts, n, k]. a, b: the pools, by weight. row: the
    first of the rows of a slot of `a` that are this site's. columns: a float32 weight [k] with which the columns of A
    are multiplied, because the input of the layer was divided by it; rows: [n], the same of B's rows; "" for none.
    gguf: the tensors that llama.cpp has it as, one above the other; gguf_rows: a float32 weight [n], which of their
    rows each of its own is, "" where the order is the same.

    table: it is an embedding of n tokens, whose rows of B are gathered; A lies turned, [k, rank]. tied: what the
    checkpoint calls another layer with the same matrix, be it a site or not; "" for none. bias: the pool of a vector
    [n] that is added, too. gain: the pool of a vector [n] of factors less 1, with which what the layer gives without an
    adapter is multiplied (DoRA). base: the weight of the program that has the parameter's values from row `base_row`
    on, where they may be asked for; base_cuts: by rank, its ranges of the axis `base_axis` of [n, k], which lie one
    behind the other there; empty where a rank that has the weight has all of it. base_bias: a float32 weight [n], what
    the layer adds by itself.
    """

    parameter: str
    n: int
    k: int
    a: str
    b: str
    row: int = 0
    experts: int = 0
    columns: str = ""
    rows: str = ""
    gguf: list[str] = []
    gguf_rows: str = ""
    table: bool = False
    tied: str = ""
    bias: str = ""
    gain: str = ""
    base: str = ""
    base_row: int = 0
    base_axis: int = 0
    base_cuts: list[list[tuple[int, int]]] = []
    base_bias: str = ""


class AdapterRoom(msgspec.Struct, frozen=True, array_like=True):
    """Which adapters fit: of at most this rank, of these weights, by name; those again, with DORA behind the name, that
    may have magnitudes."""

    rank: int
    sites: tuple[str, ...]

    def lacking(self, other: AdapterRoom) -> str:
        """What `other` has room for and this has none for, in words; "" for nothing."""
        if self.rank < other.rank:
            return f"rank {other.rank}"
        return min(set(other.sites).difference(self.sites), default="")


class AdapterPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Room for `slots` adapters of at most this rank in memory at once. gguf: what llama.cpp calls the model's
    architecture; "" where it has none."""

    slots: int
    rank: int
    pools: list[Pool]
    sites: list[AdapterSite]
    gguf: str = ""

    @property
    def room(self) -> AdapterRoom:
        """Which adapters fit."""
        magnitudes = [f"{site.parameter}{DORA}" for site in self.sites if site.gain]
        return AdapterRoom(self.rank, (*(site.parameter for site in self.sites), *magnitudes))
