"""What the scheduler hands to the executor, and what comes back: frozen, plain integers and tuples.

What there is one of per sequence and step is a named tuple: it is made in a quarter of a frozen dataclass's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from ..kv.upkeep import Upkeep

# What a request gives per token besides its ids, by the name of an input of the program: rows as they lie in memory,
# one after the other, of as many of its first tokens as it likes. Nobody here looks into them.
Extras = Mapping[str, bytes]
NO_EXTRAS: Extras = MappingProxyType({})


def pending_token(row: int) -> int:
    """Stands for the token that the step before samples from its logit row `row`; negative, unlike token ids."""
    return -1 - row


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses of a request's next tokens, as a tree that a step verifies.

    `parents[i]` is the guess that guess i follows, an index below i, or -1 where it follows the request's last token.
    Guesses that follow the same token differ.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> Draft:
        """Each guess follows the one before."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether each guess follows the one before it, so that there are no branches."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def depths(self) -> list[int]:
        """How many tokens after the request's last one each guess is, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def is_sound(self, vocab_size: int) -> bool:
        """Whether it has guesses, all of them tokens, each behind a guess before it or behind the last token."""
        follows = all(-1 <= parent < guess for guess, parent in enumerate(self.parents))
        return (
            follows
            and len(self.parents) == len(self.token_ids) > 0
            and (0 <= min(self.token_ids) and max(self.token_ids) < vocab_size)
        )

    def first_chain(self) -> Draft:
        """The guesses that follow one another from the first one on."""
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
    cache, as far as it is read. `block_tables` has a table for each KV group: position p lives in block
    `table[p // block_size]` at offset `p % block_size`; an entry is NO_BLOCK where no layer of the group reads any
    more. In a group that holds states, the one that is read is that of position start - 1, and states are left only
    behind tokens that are no guesses. The logits of the last `num_logits` tokens are wanted (0: the chunk ends before
    the sequence does), or with `first_row` those of the first one. prompt: how many tokens it began with; in a group
    that evicts, a position has the place that its policy says in the table (kv/places.py). extras: of the request, for
    all of its tokens. beam: which of the request's sequences it is, where a request goes on in several ways.

    With a `draft`, `token_ids` are the request's last token and then the guesses, all of whose logits are wanted. A
    guess at depth d takes position `start + d` and sees, from `start` on, only the tokens that it follows; but its KV
    goes where the order in `token_ids` says, until the accepted ones are moved.
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
        """Places in the cache that are written after the step; without guesses, the tokens in it."""
        return self.start + len(self.token_ids)

    @property
    def num_known(self) -> int:
        """Tokens that are no guesses."""
        return len(self.token_ids) - (len(self.draft) if self.draft is not None else 0)

    @property
    def is_tree(self) -> bool:
        """Whether it verifies guesses that do not all follow one another."""
        return self.draft is not None and not self.draft.is_chain


class ScheduledBatch(NamedTuple):
    """One step. Logit rows come in the order of the sequences. Before anything else comes the `upkeep` of each KV
    group; without any, nothing is due. All groups make the same moves.
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
        """Rows of logits that are wanted, of all sequences."""
        return sum(sequence.num_logits for sequence in self.sequences)

    def last_rows(self) -> dict[int, int]:
        """The number of the last logit row of each request that has any."""
        found, row = {}, -1
        for sequence in self.sequences:
            row += sequence.num_logits
            if sequence.num_logits:
                found[sequence.request_id] = row
        return found


class Verdict(Enum):
    """What follows from a step's logits for one request."""

    CONTINUE = "continue"
    STOP = "stop"
    ERROR = "error"  # its logits are not numbers: its KV must not be reused, and is zeroed


class StepOutcome(NamedTuple):
    """What was sampled for one request whose logits the step gave. `token_id` is None if nothing was sampled.

    `accepted` are the guesses of its draft that were sampled before it, each following the one before: their tokens
    come first, then `token_id`. beam: of the request's sequences, the one that the logits are of.
    """

    request_id: int
    token_id: int | None
    verdict: Verdict = Verdict.CONTINUE
    accepted: tuple[int, ...] = ()
    beam: int = 0


class Finished(NamedTuple):
    """A request that ended. `reason` is "stop", "length", "error" or "abort"."""

    request_id: int
    reason: str
