"""Session: a conversation with a model; turns that no longer fit its context are forgotten, and the user is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ..errors import RequestError, UsageError
from ..llm import LLM
from ..requests.params import SamplingParams
from .history import History

# the parameters that /set accepts; the others of SamplingParams are for programs
SETTINGS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name not in ("n", "logprobs", "logit_bias", "stop_token_ids")
)


@dataclass(frozen=True)
class SpokenAnswer:
    """The model's answer. reason: as in Completion, "abort" if the user stopped it. cached: how many tokens of the
    prompt were found in the prefix cache. forgotten: how many turns were dropped so that the answer has room."""

    text: str
    reason: str
    prompt_tokens: int
    cached: int
    tokens: int
    seconds: float
    forgotten: int
    fills_context: bool


class Session:
    """One conversation. `settings` are the SamplingParams that the user set; for others the model's defaults hold."""

    def __init__(self, llm: LLM, system: str = "", settings: dict[str, Any] | None = None) -> None:
        """RequestError if the engine has no usable chat template, or if a setting is invalid."""
        if llm.prompting.template is None:
            raise RequestError(
                "the engine has no chat template", "icc run --raw completes a text as it is", field="messages"
            )
        self._llm = llm
        self._limit = llm.manifest.limits.max_seq_len
        self.last: SpokenAnswer | None = None
        self.history = History(system)
        self.settings: dict[str, Any] = {}
        for name, value in (settings or {}).items():
            self.set(name, value)

    def set(self, name: str, value: Any) -> None:
        """Change a sampling parameter; None restores the model's default. UsageError or RequestError if it is
        refused."""
        if name not in SETTINGS:
            raise UsageError(f"{name} is no setting", f"settings: {', '.join(SETTINGS)}")
        changed = {**self.settings, name: value}
        changed = {name: value for name, value in changed.items() if value is not None}
        SamplingParams(**changed)
        self.settings = changed

    @property
    def context(self) -> int:
        """How many tokens the conversation may have."""
        return self._limit

    def defaults(self) -> dict[str, Any]:
        """The model's defaults of the parameters that /set accepts, if it states any."""
        params = self._resolved(SamplingParams(), 0)
        return {name: getattr(params, name) for name in SETTINGS if name != "max_tokens"}

    def ask(self, text: str, show: Callable[[str], object], stopped: Callable[[], bool]) -> SpokenAnswer:
        """Add a user's message and get the answer, see `answer`. A message that cannot be answered is removed again."""
        self.history.ask(text)
        return self.answer(show, stopped)

    def answer(self, show: Callable[[str], object], stopped: Callable[[], bool]) -> SpokenAnswer:
        """Answer the last message: `show` gets the text as it is generated, `stopped` is called after every step.

        RequestError if the message does not fit the context, even alone, or if the template refuses it; it is then
        removed.
        """
        start = time.perf_counter()
        try:
            prompt, forgotten = self._fit()
            params = SamplingParams(**self.settings) if "max_tokens" in self.settings else self._open_ended(len(prompt))
            query = self._llm.prompting.completion(prompt, self._resolved(params, len(prompt)))
            task, generation = self._llm.begin(query)
        except BaseException:
            self.history.take_back()
            raise
        try:
            while generation.finish_reason is None:
                self._llm.driver.step()
                for output in generation.outputs:
                    show(output.text)
                generation.outputs.clear()
                if stopped():
                    self._llm.driver.abort(task)
        finally:
            self._llm.driver.abort(task)
            for output in generation.outputs:  # text that was held back
                show(output.text)
            if "".join(generation.pieces):
                self.history.answer("".join(generation.pieces))
            else:
                self.history.take_back()
        completion = generation.completion()
        self.last = SpokenAnswer(
            completion.text,
            completion.finish_reason,
            len(prompt),
            generation.num_cached_tokens or 0,
            len(completion.token_ids),
            time.perf_counter() - start,
            forgotten,
            len(prompt) + len(completion.token_ids) >= self._limit,
        )
        return self.last

    def _resolved(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        defaults = self._llm.manifest.sampling.of_terminals()
        return self._llm.prompting.chat_params(params, prompt_tokens, defaults)

    def _open_ended(self, prompt_tokens: int) -> SamplingParams:
        return SamplingParams(**self.settings, max_tokens=max(self._limit - prompt_tokens, 1))

    def _fit(self) -> tuple[list[int], int]:
        """The prompt's token ids, and how many turns were forgotten so that an answer has room.

        If a turn must be forgotten, as many are forgotten as leave half of the context free: each change at the
        beginning makes the prefix cache useless, so changes should be rare.
        """
        prompt, forgotten = self._encoded(), 0
        room = min(self.settings.get("max_tokens", self._limit), max(self._limit // 4, 1))
        if len(prompt) + room > self._limit:
            while len(prompt) > self._limit // 2 and self.history.forget_oldest():
                prompt, forgotten = self._encoded(), forgotten + 1
        if len(prompt) >= self._limit:
            raise RequestError(
                f"this takes {len(prompt)} tokens, the context has {self._limit}",
                "say less, or shorten the system message",
                field="messages",
            )
        return prompt, forgotten

    def _encoded(self) -> list[int]:
        return self._llm.prompting.encode_chat(self.history.messages)
