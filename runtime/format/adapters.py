"""The room for adapters as an engine describes it: its pools, and the place in them for each weight's adapter."""

from __future__ import annotations

import msgspec

from .batch import BatchArray

ADAPTER = BatchArray("adapter", ("T",), fill=-1)  # the adapter slot of each token, -1 if it has no adapter
MAX_RANK = 256
DORA = "+dora"
ADAPTER_SECTION = "adapters"  # the section that runs if a token of the batch has an adapter


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A weight of a program that is written at run time: `slots` parts of equal size, each of which holds matrices [n,
    k].

    It is not in the file of weights and begins as zeros. Elements of type `dtype` lie in rows, or, if `tile` is more
    than 1, in tiles of so many rows: [n / tile, k, tile], the last tile padded with zeros. first: how many parts of
    that size come before the slots and stay zeros.

    cuts: if ranks hold parts, each rank's ranges of axis `axis` of all matrices [matrices, n, k]; matrices, n and k are
    then the sizes of a part. A rank without ranges has zeros. Empty if all ranks hold the same.
    """

    weight: str
    slots: int
    matrices: int  # per slot: 1, or the number of experts
    n: int
    k: int
    dtype: str
    tile: int = 1
    first: int = 0
    axis: int = 0
    cuts: list[list[tuple[int, int]]] = []


class AdapterSite(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the low-rank change of one weight of the model goes: y += B (A x).

    parameter: the weight's name in the checkpoint, [n, k], or [experts, n, k]. a, b: the weights of their pools. row:
    this site's first row in a slot of `a`. columns: a float32 weight [k] by which the columns of A are multiplied,
    because the input of the layer was divided by it; rows: [n], the same for B's rows; "" for none. gguf: llama.cpp's
    tensors that, stacked along their rows, are this weight; gguf_rows: a float32 weight [n], for each row the index of
    its row there, "" if the order is the same.

    table: whether it is an embedding of n tokens, whose rows of B are gathered; A is transposed, [k, rank]. tied: the
    checkpoint's name of another layer with the same matrix, whether that is a site or not; "" for none. bias: the pool
    of a vector [n] that is added, too. gain: the pool of a vector [n]; the layer's output without an adapter is
    multiplied by 1 + gain (DoRA). base: the weight of the program that has the parameter's values from row `base_row`
    on, if adapters may need them; base_cuts: each rank's ranges of axis `base_axis` of [n, k], stored one after the
    other; empty if a rank that holds the weight holds all of it. base_bias: a float32 weight [n], the layer's own bias.
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
    """Which adapters fit: the largest rank, and the names of the weights; a weight that may have magnitudes is listed a
    second time, with DORA after its name."""

    rank: int
    sites: tuple[str, ...]

    def lacking(self, other: AdapterRoom) -> str:
        """A text that says what `other` has room for and this has not; "" if there is nothing."""
        if self.rank < other.rank:
            return f"rank {other.rank}"
        return min(set(other.sites).difference(self.sites), default="")


class AdapterPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Room for `slots` adapters of at most this rank in memory at once. gguf: llama.cpp's name of the model's
    architecture; "" if it has none."""

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
