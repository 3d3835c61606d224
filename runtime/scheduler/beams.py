"""Beams: the sequences of one request that goes on in several ways at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..kv.cache import KVCache
from .request import ScheduledRequest


@dataclass(slots=True, eq=False)
class Beams:
    """Up to `width` sequences, which take as many places in a batch as long as any of them runs.

    A request begins as one sequence, which reads its prompt. Then each beam waits, its tokens all computed, until
    somebody has looked at the logits of all and says which go on, and how (`branch`). What beams have in common they
    share: blocks are copied when one of them writes to a block that another has, too. Who loses its blocks loses them
    with all others (`fold`): one sequence reads the prompt again, and behind it all part as they were (`unfold`).

    members: those that have blocks, or wait for them, by number. folded: the tokens of all, while only the prompt of
    one is to be read. running: whether it has blocks. ended: those that did not go on, whose blocks may still be found.
    """

    width: int
    members: dict[int, ScheduledRequest]
    folded: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    running: bool = False
    ended: list[ScheduledRequest] = field(default_factory=list[ScheduledRequest])

    @property
    def first(self) -> ScheduledRequest:
        """The one that stands for all."""
        return next(iter(self.members.values()))

    @property
    def num_unused_places(self) -> int:
        """Places in a batch that are kept for members which are not there now."""
        return self.width - len(self.members) if self.running else 0

    @property
    def has_parted(self) -> bool:
        """Whether there is more than a prompt."""
        return len(self.members) > 1 or self.first.num_new_tokens > 0

    def branch(self, kv: KVCache, choices: Sequence[tuple[int, int]]) -> list[int]:
        """Go on with these (member, token) pairs, at most `width`, and end all others: the numbers of the members that
        they are now. The first choice of a member is itself; others are new ones."""
        chosen = {parent for parent, _ in choices}
        for number in [number for number in self.members if number not in chosen]:
            self.ended.append(self.members.pop(number))
            kv.close(self.ended[-1])
        free = [number for number in range(self.width) if number not in chosen]
        free.reverse()
        placed: list[int] = []
        for parent, token in choices:  # all are forked before any goes on
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
        """Take all blocks back: the one that is left is to read the prompt again."""
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
        """The prompt is read: all are there again, with what is left to be computed of them."""
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
