"""KVExchange: publishes and takes the KV of prompts that one engine computes and another decodes, between steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...kv.cache import KVCache
from ...loop.engine_loop import EngineLoop
from .channel import Channel
from .kv_transfer import KVTransfer
from .messages import KVTaken, Submit, TakeKV
from .prompts import Prompt, PromptStage

_WHOLE = ("stop", "length")  # finish reasons of prompts whose KV is complete


class KVExchange:
    """Publishes ("gives") the KV of prompts after each of their steps, and takes KV that other engines publish.
    transfer: None if the cache cannot be accessed: then nothing is given or taken."""

    def __init__(self, transfer: KVTransfer | None, loop: EngineLoop, channel: Channel) -> None:
        self._transfer, self._loop, self._channel = transfer, loop, channel
        self._giving: dict[int, Prompt] = {}

    @property
    def works(self) -> bool:
        """Whether KV can be given and taken."""
        return self._transfer is not None and not (self._kv.whole or self._kv.evicts)

    @property
    def _kv(self) -> KVCache:
        """The current cache, which is replaced after a failed step."""
        return self._loop.scheduler.kv

    def begin(self, prompt: Prompt) -> None:
        """Called before a prompt is submitted: take its KV, or register it to be given."""
        if prompt.submit.takes_kv:
            self._take(lambda transfer: transfer.take(self._kv, prompt.submit))
        if prompt.submit.gives_kv and self._transfer is not None:
            self._giving[prompt.id] = prompt

    def take(self, given: TakeKV) -> None:
        """Take the parts of a prompt that another engine has given."""
        self._take(lambda transfer: transfer.take_parts(self._kv, given.name, given.salt))

    def drop(self, name: str) -> None:
        """Stop taking the KV under a name: its prompt was cancelled."""
        if self._transfer is not None and name:
            self._transfer.drop(name)

    def give(self) -> None:
        """Give the KV computed so far of registered prompts, and forget prompts that have ended."""
        for prompt in list(self._giving.values()):
            assert self._transfer is not None
            if prompt.stage is PromptStage.ENDED:
                del self._giving[prompt.id]
                self._transfer.end(prompt.id, remove=not _is_whole(prompt))
            elif (given := self._transfer.give(self._kv, prompt.submit)) is not None:
                self._channel.send(given)

    def sweep(self) -> None:
        """Remove KV that was never taken."""
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
    """Whether another engine can use the KV of a prompt: it depends only on the tokens and the salt, and no logits of
    the prompt are wanted."""
    return (
        not (submit.adapter or submit.extras or submit.gives_kv or submit.takes_kv) and submit.prompt_logprobs is None
    )
