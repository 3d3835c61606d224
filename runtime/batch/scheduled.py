"""The records that the scheduler passes to the executor, and the results: immutable, plain integers and tuples.

Records that are made per sequence and step are named tuples: making one takes a quarter of the time of a frozen
dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from ..kv.upkeep import Upkeep

# A request's inputs per token besides the ids, by the name of an input of the program: the bytes of consecutive rows,
# for any number of its first tokens. The scheduler does not interpret them.
Extras = Mapping[str, bytes]
NO_EXTRAS: Extras = MappingProxyType({})


def pending_token(row: int) -> int:
    """A placeholder for the token that the previous step samples from its logit row `row`; negative, unlike token
    ids."""
    return -1 - row


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens ("guesses") for a request, as a tree that a step verifies.

    `parents[i]` is the index of the guess that guess i follows, below i, or -1 if it follows the request's last token.
    Guesses that follow the same token differ.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> Draft:
        """A draft in which each guess follows the one before."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether each guess follows the one before it, so that there are no branches."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def depths(self) -> list[int]:
        """The depth of each guess: how many tokens it comes after the request's last token, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def is_sound(self, vocab_size: int) -> bool:
        """Whether the draft is not empty, all its guesses are token ids, and each follows an earlier guess or the last
        token."""
        follows = all(-1 <= parent < guess for guess, parent in enumerate(self.parents))
        return (
            follows
            and len(self.parents) == len(self.token_ids) > 0
            and (0 <= min(self.token_ids) and max(self.token_ids) < vocab_size)
        )

    def first_chain(self) -> Draft:
        """The draft reduced to one chain, which starts at the first guess."""
        if self.is_chain:
            return self
        kept: list[int] = []
        for guess, parent in enumerate(self.parents):
            if parent == (kept[-1] if kept else -1):
                kept.append(guess)
        return Draft.chain([self.token_ids[guess] for guess in kept])

    def limited(self, count: int, depth: int) -> Draft:
        """The first `count` guesses that are at most `depth` deep."""
        if len(self) <= count and len(self) <= depth:
            return self
        kept: dict[int, int] = {-1: -1}  # guess -> its new number
        for index, here in enumerate(self.depths()):
            if here <= depth and len(kept) <= count and self.parents[index] in kept:
                kept[index] = len(kept) - 1
        chosen = [index for index in kept if index >= 0]
        tokens = tuple(self.token_ids[index] for index in chosen)
        return Draft(tokens, tuple(kept[self.parents[index]] for index in chosen))


class ScheduledSequence(NamedTuple):
    """The part of one request that runs in a step.

    `token_ids` take positions `start .. start + len(token_ids) - 1`; the KV of everything before `start` is in the
    cache, except what no layer reads any more. `block_tables` has a table for each KV group: position p lies in block
    `table[p // block_size]` at offset `p % block_size`; an entry is NO_BLOCK if no layer of the group reads that block
    any more. In a group that holds states, the state of position start - 1 is read, and states are stored only after
    tokens that are not guesses. The logits of the last `num_logits` tokens are wanted (0: the chunk ends before the
    sequence does), or with `first_row` those of the first token. prompt: the length of the prompt in tokens; in a group
    that evicts, the policy maps a position to its place in the table (kv/places.py). extras: those of the request, for
    all of its tokens. beam: the index of this sequence among the request's beams.

    With a `draft`, `token_ids` are the request's last token followed by the guesses, and the logits of all are wanted.
    A guess at depth d takes position `start + d` and sees, from `start` on, only the tokens that it follows; but its KV
    is stored in the order of `token_ids`, until the accepted guesses are moved.
    """

    request_id: int
    token_ids: tuple[int, ...]
    start: int
    block_tables: tuple[tuple[int, ...], ...]
    num_logits: int
    draft: Draft | None = None
    first_row: bool = False
    prompt: int = 0
    extras: Extras = NO_EXTRAS
    beam: int = 0

    @property
    def end(self) -> int:
        """How many slots of the cache are filled after the step; without guesses, this is the sequence's number of
        tokens."""
        return self.start + len(self.token_ids)

    @property
    def num_known(self) -> int:
        """The number of tokens that are not guesses."""
        return len(self.token_ids) - (len(self.draft) if self.draft is not None else 0)

    @property
    def decodes(self) -> bool:
        """Whether it runs a request's last token, perhaps with guesses after it."""
        return self.num_known == 1 and self.num_logits > 0

    @property
    def is_tree(self) -> bool:
        """Whether it verifies a draft with branches."""
        return self.draft is not None and not self.draft.is_chain


class ScheduledBatch(NamedTuple):
    """One step. Logit rows are in the order of the sequences. The `upkeep` of each KV group (() if there is none) is
    done first. All groups make the same moves.
    """

    sequences: tuple[ScheduledSequence, ...]
    upkeep: tuple[Upkeep, ...] = ()

    @property
    def num_moves(self) -> int:
        """How many slots are copied in each group."""
        return len(self.upkeep[0].moves) if self.upkeep else 0

    @property
    def copies_blocks(self) -> bool:
        """Whether any group copies whole blocks: to host memory, back, or to another block."""
        return any(upkeep.copies_blocks for upkeep in self.upkeep)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, guesses included."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_logit_rows(self) -> int:
        """The number of logit rows that are wanted, over all sequences."""
        return sum(sequence.num_logits for sequence in self.sequences)

    def last_rows(self) -> dict[int, int]:
        """By request id, the index of the request's last logit row in the step; requests without logit rows are left
        out."""
        found, row = {}, -1
        for sequence in self.sequences:
            row += sequence.num_logits
            if sequence.num_logits:
                found[sequence.request_id] = row
        return found


class Verdict(Enum):
    """What the sampler decides about one request after a step."""

    CONTINUE = "continue"
    STOP = "stop"
    ERROR = "error"  # its logits are not finite: its KV must not be reused, and is zeroed


class StepOutcome(NamedTuple):
    """The tokens sampled for one request whose logits the step computed. `token_id` is None if nothing was sampled.

    `accepted` are the guesses of its draft that were sampled before it, each following the one before: their tokens
    come first, then `token_id`. beam: the index of the sequence that the logits belong to, among the request's beams.
    """

    request_id: int
    token_id: int | None
    verdict: Verdict = Verdict.CONTINUE
    accepted: tuple[int, ...] = ()
    beam: int = 0


class Finished(NamedTuple):
    """A request that has ended; `reason` is "stop", "length", "error" or "abort"."""

    request_id: int
    reason: str
