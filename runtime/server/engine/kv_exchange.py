"""KVExchange: what an engine process does between its steps about prompts that go on elsewhere, or come from there."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...kv.cache import KVCache
from ...loop.engine_loop import EngineLoop
from .channel import Channel
from .kv_transfer import KVTransfer
from .messages import KVTaken, Submit, TakeKV
from .prompts import Prompt, PromptStage

_WHOLE = ("stop", "length")  # why a prompt ends whose KV is of use


class KVExchange:
    """Gives the KV of prompts after each step of theirs, and takes what others give. transfer: None where the cache is
    out of reach: nothing is given then, and nothing taken."""

    def __init__(self, transfer: KVTransfer | None, loop: EngineLoop, channel: Channel) -> None:
        self._transfer, self._loop, self._channel = transfer, loop, channel
        self._giving: dict[int, Prompt] = {}

    @property
    def works(self) -> bool:
        """Whether KV can be given and taken."""
        return self._transfer is not None and not (self._kv.whole or self._kv.evicts)

    @property
    def _kv(self) -> KVCache:
        """The cache at work: after a step that failed, it is another."""
        return self._loop.scheduler.kv

    def begin(self, prompt: Prompt) -> None:
        """A prompt is about to be submitted."""
        if prompt.submit.takes_kv:
            self._take(lambda transfer: transfer.take(self._kv, prompt.submit))
        if prompt.submit.gives_kv and self._transfer is not None:
            self._giving[prompt.id] = prompt

    def take(self, given: TakeKV) -> None:
        """Another engine has given a part of a prompt."""
        self._take(lambda transfer: transfer.take_parts(self._kv, given.name, given.salt))

    def drop(self, name: str) -> None:
        """Nobody waits for a prompt of which another engine gives the KV under a name."""
        if self._transfer is not None and name:
            self._transfer.drop(name)

    def give(self) -> None:
        """Give what is computed by now of prompts that go on elsewhere, and forget those that have ended."""
        for prompt in list(self._giving.values()):
            assert self._transfer is not None
            if prompt.stage is PromptStage.ENDED:
                del self._giving[prompt.id]
                self._transfer.end(prompt.id, remove=not _is_whole(prompt))
            elif (given := self._transfer.give(self._kv, prompt.submit)) is not None:
                self._channel.send(given)

    def sweep(self) -> None:
        """Remove what nobody has taken."""
        if self._transfer is not None:
            self._transfer.sweep()

    def _take(self, take: Callable[[KVTransfer], int]) -> None:
        if self._transfer is None:
            return
        start = time.perf_counter()
        tokens = take(self._transfer)
        self._channel.send(KVTaken(tokens, time.perf_counter() - start))


def _is_whole(prompt: Prompt) -> bool:
    return bool(prompt.generations) and all(one.finish_reason in _WHOLE for one in prompt.generations)


def shared(submit: Submit) -> bool:
    """Whether the KV of a prompt is of use to another engine: nothing but its tokens and its salt decides it, and its
    answer needs no logits of it."""
    return (
        not (submit.adapter or submit.extras or submit.gives_kv or submit.takes_kv) and submit.prompt_logprobs is None
    )
