"""Handover: one replica computes a prompt, and another decodes the answer (Splitwise: Patel et al. 2024, arXiv
2311.18677; DistServe: Zhong et al. 2024, arXiv 2401.09670)."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from ...requests.params import SamplingParams
from .engine_client import EngineClient
from .engine_stream import EngineStream, SentPrompt
from .messages import Delta, DropKV, Embedded, KVGiven, PromptLogprobs, Submit, TakeKV


class Handover(EngineStream):
    """A prompt that one replica computes for another. Each part of its KV is announced to the answering replica at
    once; the one token that is sampled is dropped.

    prompt: the client's prompt. target: the replica that answers. ended: called once, with True when all KV is
    published, with False when the computing replica has failed; `submit` is then the prompt for `target`, with the KV
    so far.
    """

    def __init__(
        self, number: int, prompt: SentPrompt, target: EngineClient, ended: Callable[[Handover, bool], None]
    ) -> None:
        """number: the id of the prompt on the computing replica."""
        params = SamplingParams(max_tokens=1, temperature=0)
        asked = msgspec.structs.replace(prompt.submit, id=number, params=params, grammar="", gives_kv=True)
        super().__init__([asked])
        self.prompt, self.target, self._ended = prompt, target, ended
        self._process, self._begun, self._name = target.pid, time.monotonic(), ""

    @property
    def target_stays(self) -> bool:
        """Whether the answering replica takes prompts and still has the process that got the KV."""
        return self.target.takes and self.target.pid == self._process

    @property
    def submit(self) -> Submit:
        """The prompt for the answering replica, with the rest of its deadline."""
        submit, passed = self.prompt.submit, time.monotonic() - self._begun
        left = None if submit.deadline is None else max(submit.deadline - passed, 0.0)
        return msgspec.structs.replace(submit, takes_kv=self._name, deadline=left)

    def push(self, delta: Delta) -> None:
        super().push(delta)
        if delta.reason is not None:
            self._ended(self, True)

    def add(self, found: PromptLogprobs | Embedded | KVGiven) -> None:
        assert isinstance(found, KVGiven)
        self._name = found.name
        if self.target_stays:
            self.target.tell(TakeKV(found.name, self.prompt.submit.salt))

    def drop(self) -> None:
        """Cancel the handover: the KV is not taken."""
        if self._name and self.target_stays:
            self.target.tell(DropKV(self._name))

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._ended(self, False)
