"""KV groups: layers whose caches have the same block shape and keep the same positions, and the layout of their
memory."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..kv.places import Places
from ..kv.policy import POLICIES, CachePolicy, WithinStep
from .kv_numbers import KV_NUMBERS, KVNumbers
from .manifest import Limits

MAX_BLOCK_SIZE = 4096  # tokens


class KVLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The KV of one token in one attention layer: keys [kv_heads, key_dim] and values [kv_heads, value_dim].

    state: for a layer with a recurrent state instead, its size in 4-byte words; a block holds one state, whatever its
    number of tokens. shared: values are the first value_dim elements of the keys and are not stored again. scored: each
    token and head also has a float32 score at the end of the block: the attention that it received. align: each key and
    value of unpacked elements takes a multiple of this many bytes.
    """

    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    state: int = 0
    shared: bool = False
    scored: bool = False
    align: int = 1

    def block_bytes(self, block_size: int, numbers: KVNumbers) -> int:
        """The size in bytes of one block (keys and values in format `numbers`, or a state), rounded up to 64."""
        if self.state:
            return (4 * self.state + 63) // 64 * 64
        vectors = block_size * self.kv_heads
        stored = (self.key_dim,) if self.shared else (self.key_dim, self.value_dim)
        raw = vectors * sum(numbers.vector_bytes(dim, self.align) for dim in stored)
        if numbers.scaled:
            raw = (raw + 3) // 4 * 4 + vectors * len(stored) * 4
        if self.scored:
            raw = (raw + 3) // 4 * 4 + vectors * 4
        return (raw + 63) // 64 * 64


class KVGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Layers that share block tables. block_size: tokens per block. dtype: the name of the KV format.

    stored: the sizes of a format that is not in KV_NUMBERS, so that an engine with a format of another package runs
    without that package; None if it is in KV_NUMBERS. keeps: the name of a CachePolicy in POLICIES, which is made with
    `size` and, if it takes two numbers, with `beside`: how many tokens are always kept, the first ones for "streaming",
    the last ones for "h2o" and "snapkv". layers: by layer number, as in the steps of the program.
    """

    block_size: int
    dtype: str
    layers: dict[int, KVLayer]
    keeps: str = "all"
    size: int = 0
    beside: int = 0
    stored: KVNumbers | None = None

    @property
    def numbers(self) -> KVNumbers:
        """The KV format of its numbers; KeyError if `dtype` is unknown and `stored` is None."""
        return self.stored or KV_NUMBERS[self.dtype]

    @property
    def policy(self) -> CachePolicy:
        """The policy that says which positions of a sequence are kept; KeyError if it is not known."""
        return POLICIES[self.keeps](self.size, *((self.beside,) if self.beside else ()))

    def layer_bytes(self, number: int) -> int:
        """The size in bytes of one block in one layer."""
        return self.layers[number].block_bytes(self.block_size, self.numbers)

    def block_bytes(self) -> int:
        """The size in bytes of one block id, over all layers."""
        return sum(map(self.layer_bytes, self.layers))

    @property
    def holds_states(self) -> bool:
        """Whether a block holds one state, whatever the number of its tokens."""
        return self.keeps == "state"

    def bytes_per_token(self) -> float:
        """How many bytes a token takes while it is kept; 0 if the group holds states."""
        return 0.0 if self.holds_states else self.block_bytes() / self.block_size

    def bytes_read(self, length: int) -> float:
        """How many bytes the next token of a sequence of `length` tokens reads."""
        if self.holds_states:
            return float(self.block_bytes())
        return sum(map(len, self.policy.kept(length))) * self.bytes_per_token()

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_of_batch(self, max_seq_len: int, sequences: int, step_tokens: int) -> int:
        """The most blocks that `sequences` sequences of full length can have at once, in steps of up to `step_tokens`
        tokens."""
        more = self.blocks_for(step_tokens) + sequences  # a chunk may begin and end within a block
        if isinstance(self.policy, WithinStep):
            return more + sequences  # the scheduler leaves one block free for each sequence
        if self.holds_states:  # two for a growing sequence, two more for one that reads a prompt, and the checkpoints
            return min((2 + self.size) * sequences + 2, self.blocks_for(max_seq_len) * sequences)
        kept = self.policy.most_blocks(max_seq_len, self.block_size) * sequences
        if isinstance(self.policy, Places):
            return kept
        return min(kept + more, self.blocks_for(max_seq_len) * sequences)


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache of an engine: its groups, in the order of the block tables in a batch."""

    groups: tuple[KVGroup, ...]

    def group_of(self, layer: int) -> int:
        """The index of a layer's group; KeyError if there is no such layer."""
        for number, group in enumerate(self.groups):
            if layer in group.layers:
                return number
        raise KeyError(layer)

    def first_layers(self, count: int) -> KVLayout:
        """The layout with only the layers whose number is below `count`."""
        kept = [{n: layer for n, layer in group.layers.items() if n < count} for group in self.groups]
        return KVLayout(
            tuple(msgspec.structs.replace(group, layers=of) for group, of in zip(self.groups, kept, strict=True))
        )

    def bytes_per_token(self) -> float:
        """How many bytes a token takes in all layers, while it is kept in all."""
        return sum(group.bytes_per_token() for group in self.groups)

    def blocks_needed(self, limits: Limits, sequences: int) -> tuple[int, ...]:
        """For each group, how many blocks `sequences` sequences of full length need, so that no request is ever
        preempted."""
        length, tokens = limits.max_seq_len, limits.max_step_tokens
        return tuple(group.blocks_of_batch(length, sequences, tokens) for group in self.groups)

    def split(self, nbytes: int, least: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
        """How many blocks each group gets in `nbytes` of memory: `least`, plus the same share of `most - least` for all
        groups.

        A group gets `least` even if that does not fit.
        """
        sizes = [group.block_bytes() for group in self.groups]
        rest = nbytes - sum(size * count for size, count in zip(sizes, least, strict=True))
        more = [high - low for low, high in zip(least, most, strict=True)]
        whole = sum(size * count for size, count in zip(sizes, more, strict=True))
        if rest >= whole:
            return tuple(most)
        return tuple(low + max(rest, 0) * count // whole for low, count in zip(least, more, strict=True))


class KVMemory(msgspec.Struct, frozen=True):
    """Memory with `num_blocks` blocks of each group.

    Groups lie one after the other, and within a group its layers; the blocks of a layer are `layer_bytes` apart. A
    block contains first keys, then values; the executor decides the order within these.
    """

    layout: KVLayout
    num_blocks: tuple[int, ...]

    @property
    def group_bytes(self) -> list[int]:
        """The size of each group in bytes."""
        pairs = zip(self.layout.groups, self.num_blocks, strict=True)
        return [count * group.block_bytes() for group, count in pairs]

    @property
    def nbytes(self) -> int:
        """The size of all groups in bytes."""
        return sum(self.group_bytes)

    def layer_offset(self, layer: int) -> int:
        """The byte offset of a layer's block 0; KeyError if there is no such layer."""
        number = self.layout.group_of(layer)
        group = self.layout.groups[number]
        before = list(group.layers)[: list(group.layers).index(layer)]
        return sum(self.group_bytes[:number]) + self.num_blocks[number] * sum(map(group.layer_bytes, before))

    def block_places(self, group: int, block: int) -> list[tuple[int, int]]:
        """(byte offset, size in bytes) of a block in every layer of its group."""
        places, base = [], sum(self.group_bytes[:group])
        for number in self.layout.groups[group].layers:
            nbytes = self.layout.groups[group].layer_bytes(number)
            places.append((base + block * nbytes, nbytes))
            base += self.num_blocks[group] * nbytes
        return places
