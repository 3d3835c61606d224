"""KV groups: the layers whose cache has one shape of blocks and keeps the same positions, and where it all lies."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..kv.places import Places
from ..kv.policy import POLICIES, CachePolicy, WithinStep
from .kv_numbers import KV_NUMBERS, KVNumbers
from .manifest import Limits

MAX_BLOCK_SIZE = 4096  # tokens


class KVLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one attention layer caches of a token: keys [kv_heads, key_dim] and values [kv_heads, value_dim].

    state: of a layer with a recurrent state, its words of 4 bytes instead; it is kept once, whatever a block's size.
    shared: values are the first value_dim elements of keys, and not stored again. scored: each token and head has a
    float32 score beside, behind all else of the block: the attention it got. align: of how many bytes each key and
    value of unpacked elements takes a multiple.
    """

    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    state: int = 0
    shared: bool = False
    scored: bool = False
    align: int = 1

    def block_bytes(self, block_size: int, numbers: KVNumbers) -> int:
        """Bytes of one block, keys and values stored as `numbers` or a state, rounded up to 64."""
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
    """Layers that share block tables: blocks of `block_size` tokens, `dtype` the name of what numbers are stored as.

    stored: the sizes of that, where `dtype` is none of KV_NUMBERS, so that engines with formats of other packages run
    where those packages are not installed; None where it is one.
    keeps: the name of a CachePolicy, as POLICIES has them, that is made of `size`, and of another number `beside` it
    where it has two: of "streaming" the first tokens, of "h2o" and "snapkv" the last, which are kept in any case.
    layers: by the number that the steps of the program know them by.
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
        """What its numbers are stored as; KeyError if that is neither known nor told."""
        return self.stored or KV_NUMBERS[self.dtype]

    @property
    def policy(self) -> CachePolicy:
        """Which positions of a sequence its blocks are kept for; KeyError if the policy is not known."""
        return POLICIES[self.keeps](self.size, *((self.beside,) if self.beside else ()))

    def layer_bytes(self, number: int) -> int:
        """Bytes of one block in one layer."""
        return self.layers[number].block_bytes(self.block_size, self.numbers)

    def block_bytes(self) -> int:
        """Bytes that one block id takes over all layers."""
        return sum(map(self.layer_bytes, self.layers))

    @property
    def holds_states(self) -> bool:
        """Whether a block holds one state, whatever the number of its tokens."""
        return self.keeps == "state"

    def bytes_per_token(self) -> float:
        """What a token takes, as long as it is kept; nothing of what is kept once per sequence."""
        return 0.0 if self.holds_states else self.block_bytes() / self.block_size

    def bytes_read(self, length: int) -> float:
        """What the next token of a sequence of `length` tokens reads."""
        if self.holds_states:
            return float(self.block_bytes())
        return sum(map(len, self.policy.kept(length))) * self.bytes_per_token()

    def blocks_for(self, num_tokens: int) -> int:
        """The length of a block table for so many tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_of_batch(self, max_seq_len: int, sequences: int, step_tokens: int) -> int:
        """How many blocks the longest sequences can have at once, in steps of up to `step_tokens` tokens."""
        more = self.blocks_for(step_tokens) + sequences  # a chunk may end, and begin, within a block
        if isinstance(self.policy, WithinStep):
            return more + sequences  # of which the scheduler leaves one free for each
        if self.holds_states:  # two while one grows, another two for who reads a prompt, and the checkpoints
            return min((2 + self.size) * sequences + 2, self.blocks_for(max_seq_len) * sequences)
        kept = self.policy.most_blocks(max_seq_len, self.block_size) * sequences
        if isinstance(self.policy, Places):
            return kept
        return min(kept + more, self.blocks_for(max_seq_len) * sequences)


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache of an engine: its groups, in the order in which batches have their tables."""

    groups: tuple[KVGroup, ...]

    def group_of(self, layer: int) -> int:
        """The number of a layer's group; KeyError if there is no such layer."""
        for number, group in enumerate(self.groups):
            if layer in group.layers:
                return number
        raise KeyError(layer)

    def first_layers(self, count: int) -> KVLayout:
        """A layout of these groups without the layers from number `count` on."""
        kept = [{n: layer for n, layer in group.layers.items() if n < count} for group in self.groups]
        return KVLayout(
            tuple(msgspec.structs.replace(group, layers=of) for group, of in zip(self.groups, kept, strict=True))
        )

    def bytes_per_token(self) -> float:
        """What a token takes in all layers, as long as it is kept in all."""
        return sum(group.bytes_per_token() for group in self.groups)

    def blocks_needed(self, limits: Limits, sequences: int) -> tuple[int, ...]:
        """For each group how many blocks `sequences` sequences of full length need: with so many nobody is ever
        preempted."""
        length, tokens = limits.max_seq_len, limits.max_step_tokens
        return tuple(group.blocks_of_batch(length, sequences, tokens) for group in self.groups)

    def split(self, nbytes: int, least: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
        """How many blocks each group gets of so much memory: `least`, and all the same share of what `most` is more.

        No less than `least` if that does not fit either.
        """
        sizes = [group.block_bytes() for group in self.groups]
        rest = nbytes - sum(size * count for size, count in zip(sizes, least, strict=True))
        more = [high - low for low, high in zip(least, most, strict=True)]
        whole = sum(size * count for size, count in zip(sizes, more, strict=True))
        if rest >= whole:
            return tuple(most)
        return tuple(low + max(rest, 0) * count // whole for low, count in zip(least, more, strict=True))


class KVMemory(msgspec.Struct, frozen=True):
    """A piece of memory with `num_blocks` blocks of each group.

    The groups lie one after the other, and in a group its layers; the blocks of a layer are `layer_bytes` apart. In a
    block come first keys, then values; the order inside is the executor's.
    """

    layout: KVLayout
    num_blocks: tuple[int, ...]

    @property
    def group_bytes(self) -> list[int]:
        """Bytes of each group."""
        pairs = zip(self.layout.groups, self.num_blocks, strict=True)
        return [count * group.block_bytes() for group, count in pairs]

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return sum(self.group_bytes)

    def layer_offset(self, layer: int) -> int:
        """Where a layer's block 0 begins; KeyError if there is no such layer."""
        number = self.layout.group_of(layer)
        group = self.layout.groups[number]
        before = list(group.layers)[: list(group.layers).index(layer)]
        return sum(self.group_bytes[:number]) + self.num_blocks[number] * sum(map(group.layer_bytes, before))

    def block_places(self, group: int, block: int) -> list[tuple[int, int]]:
        """(offset, bytes) of a block in every layer of its group."""
        places, base = [], sum(self.group_bytes[:group])
        for number in self.layout.groups[group].layers:
            nbytes = self.layout.groups[group].layer_bytes(number)
            places.append((base + block * nbytes, nbytes))
            base += self.num_blocks[group] * nbytes
        return places
