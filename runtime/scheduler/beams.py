"""Beams: the sequences of one request under beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..kv.cache import KVCache
from .request import ScheduledRequest


@dataclass(slots=True, eq=False)
class Beams:
    """Up to `width` sequences. While any of them runs, the request occupies `width` places in a batch.

    A request begins as one sequence, which reads its prompt. After each step all beams wait until the search has their
    logits and decides how they continue (`branch`). Beams share blocks; a shared block is copied when one of them
    writes to it. If a beam loses its blocks, all beams do (`fold`): one sequence then reads the prompt again, and the
    beams are restored after it (`unfold`).

    members: the current sequences by number. folded: the tokens of all beams by number, while one sequence reads the
    prompt. running: whether they have blocks. ended: beams that were not continued, whose blocks may still be in the
    prefix cache.
    """

    width: int
    members: dict[int, ScheduledRequest]
    folded: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    running: bool = False
    ended: list[ScheduledRequest] = field(default_factory=list[ScheduledRequest])

    @property
    def first(self) -> ScheduledRequest:
        """The sequence that represents the request."""
        return next(iter(self.members.values()))

    @property
    def num_unused_places(self) -> int:
        """How many places in a batch are reserved for beams that do not exist now."""
        return self.width - len(self.members) if self.running else 0

    @property
    def has_parted(self) -> bool:
        """Whether there are several beams, or tokens after the prompt."""
        return len(self.members) > 1 or self.first.num_new_tokens > 0

    def branch(self, kv: KVCache, choices: Sequence[tuple[int, int]]) -> list[int]:
        """Continue with these (member number, token) pairs, at most `width`, and end all other members. Returns the
        number of the member for each pair: the first pair of a member keeps it, further ones become new members."""
        chosen = {parent for parent, _ in choices}
        for number in [number for number in self.members if number not in chosen]:
            self.ended.append(self.members.pop(number))
            kv.close(self.ended[-1])
        free = [number for number in range(self.width) if number not in chosen]
        free.reverse()
        placed: list[int] = []
        for parent, token in choices:  # fork all before any is extended
            number = parent if parent not in placed else free.pop()
            if number != parent:
                member = self.members[parent]
                self._fork(kv, member, number, [*member.tokens, token])
            placed.append(number)
        for number, (parent, token) in zip(placed, choices, strict=True):
            if number == parent:
                self.members[parent].tokens.append(token)
        return placed

    def fold(self, kv: KVCache) -> ScheduledRequest:
        """Release all blocks and keep one sequence, which must read the prompt again; returns it."""
        first = self.first
        self.folded = {number: member.tokens for number, member in self.members.items()}
        for member in self.members.values():
            kv.close(member)
            member.stop()
        self.members = {first.beam: first}
        first.tokens = list(first.spec.token_ids)
        first.folded, first.parted = True, False
        return first

    def unfold(self, kv: KVCache) -> None:
        """Restore all beams after the prompt was read; their later tokens must be computed again."""
        first, folded = self.first, self.folded
        self.folded, first.folded = {}, False
        for number, tokens in folded.items():
            if number != first.beam:
                self._fork(kv, first, number, tokens)
        first.tokens = folded[first.beam]

    def _fork(self, kv: KVCache, parent: ScheduledRequest, number: int, tokens: list[int]) -> None:
        parent.parted = True
        self.members[number] = replace(
            parent,
            tokens=tokens,
            tables=kv.fork(parent),
            beam=number,
            _frozen_tables=(),
            _keys=parent.keys_of(parent.num_computed_tokens),
        )
