"""Generation: a request that samples, and its result, a Completion."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ..batch.scheduled import StepOutcome, Verdict
from .params import SamplingParams
from .request import Output, Request
from .sampler import AcceptedTokens, SampledToken, Sampler, TokenLogprob

if TYPE_CHECKING:
    from ..reading.answer import MakeReader
    from ..reading.parts import ToolCall
    from ..tokenizer import Detokenizer, StopFinder


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the arrival of a request: `ttft` to its first token, `total` to its end."""

    ttft: float
    total: float


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion of one prompt.

    finish_reason: "stop" (end token, stop id or stop string), "length" (max_tokens or the engine's max_seq_len),
    "abort", or "error" (the model's logits were not numbers; the tokens before are kept); in a stream also "too_few",
    if a beam search found no text (`generate` raises an error instead). `token_ids` include the token that ended it,
    `text` does not. `logprobs`: per token; None if not wanted. `index` counts the completions of one prompt. `score`
    ranks the results of a beam search: the sum of the tokens' log-probabilities divided by their number to the power of
    `length_penalty`; None without beam search. In a conversation, `text` is for the user, `reasoning` is what the model
    thought before (None: nothing), and `tool_calls` are the tools that it calls; finish_reason is "tool_calls" then.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    index: int = 0
    timing: Timing = field(default=Timing(0.0, 0.0), compare=False)
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    score: float | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message for call in self.tool_calls]
        return message

    def read_by(self, make: MakeReader | None) -> Completion:
        """The completion split into text, thoughts and calls by a reader. make None: it is text only, and unchanged."""
        if make is None:
            return self
        from ..reading.answer import Answer

        told = Answer(make).push(self.text, self.finish_reason)
        return replace(
            self,
            text=told.text,
            reasoning=told.reasoning or None,
            tool_calls=told.calls,
            finish_reason=told.reason or self.finish_reason,
        )


class Generation(Request, eq=False, kw_only=True):
    """A request that samples: its sampler, its text so far, and the outputs that were not taken yet.

    `detokenizer` and `stop_finder` are None in an engine without tokenizer. `end_ids` are the tokens that end it.
    `index` counts the completions of one prompt. `search`: the beam search that finds its tokens; None if it samples.
    """

    params: SamplingParams
    sampler: Sampler
    end_ids: frozenset[int]
    detokenizer: Detokenizer | None
    stop_finder: StopFinder | None
    index: int = 0
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    pieces: list[str] = msgspec.field(default_factory=list)
    outputs: deque[Output] = msgspec.field(default_factory=deque)
    first_token: float | None = None
    score: float | None = None
    search: Request | None = None
    _held: list[Output] = msgspec.field(default_factory=list)  # outputs of the current step, until `deliver`

    @property
    def sampled(self) -> Sequence[int]:
        return self.token_ids

    @property
    def has_all_tokens(self) -> bool:
        return len(self.token_ids) >= self.spec.max_new_tokens

    def take(self, walk: AcceptedTokens) -> StepOutcome:
        """Take the tokens of a step one by one, until one ends the request. `deliver` returns their outputs."""
        for number, sample in enumerate(walk.samples[:-1]):
            outcome = self.take_one(sample)
            if outcome.verdict is not Verdict.CONTINUE:
                return outcome._replace(accepted=walk.accepted[:number])
        return self.take_one(walk.samples[-1])._replace(accepted=walk.accepted)

    def take_one(self, sample: SampledToken | None) -> StepOutcome:
        """Take one token; None if the logits were not numbers."""
        try:
            verdict, text = (Verdict.ERROR, "") if sample is None else self.accept(sample)
        except Exception as error:  # the tokenizer failed on this request's tokens; other requests continue
            self.fault = error
            verdict, text = Verdict.ERROR, ""
        if sample is None or verdict is Verdict.ERROR:
            self._held.append(Output(self.request_id, None))
            return StepOutcome(self.request_id, None, Verdict.ERROR)
        self._held.append(Output(self.request_id, sample.token_id, text, sample.logprob))
        return StepOutcome(self.request_id, sample.token_id, verdict)

    def deliver(self, reason: str | None = None) -> list[Output]:
        """One output per token since the last call. reason: ends the request with the last output; None: it
        continues."""
        outputs, self._held = self._held, []
        if reason is not None:
            last = outputs.pop() if outputs else Output(self.request_id, None)
            text = last.text if reason == "stop" else last.text + self._last_words()
            stop = self.stop_finder.found if self.stop_finder is not None and reason == "stop" else None
            outputs.append(last._replace(text=text, finish_reason=reason, stop=stop, score=self.score))
            self.end(reason)
        self.outputs += outputs
        return outputs

    def _last_words(self) -> str:
        try:
            return self.flush()
        except Exception as error:  # a detokenizer that failed once may fail again
            self.fault = self.fault or error
            return ""

    def accept(self, sample: SampledToken) -> tuple[Verdict, str]:
        """Take a sampled token; returns whether the request continues, and the text that is now safe to show."""
        self.token_ids.append(sample.token_id)
        if sample.logprob is not None:
            self.logprobs.append(sample.logprob)
        if sample.token_id in self.end_ids:
            return Verdict.STOP, self.flush()
        if self.detokenizer is None:
            return Verdict.CONTINUE, ""
        return self._show(self.detokenizer.push(sample.token_id))

    def _show(self, piece: str) -> tuple[Verdict, str]:
        assert self.stop_finder is not None
        text, stopped = self.stop_finder.push(piece)
        self.pieces.append(text)
        return (Verdict.STOP if stopped else Verdict.CONTINUE), text

    def flush(self) -> str:
        """The text that is still held back when the request ends without a stop string."""
        if self.detokenizer is None or self.stop_finder is None:
            return ""
        verdict, text = self._show(self.detokenizer.flush())
        if verdict is Verdict.CONTINUE:
            held = self.stop_finder.flush()
            self.pieces.append(held)
            text += held
        return text

    def completion(self) -> Completion:
        """The result; requires that the request has ended. Raises the error that ended it."""
        if self.fault is not None:
            raise self.fault
        assert self.finish_reason is not None and self.finished is not None
        first = self.finished if self.first_token is None else self.first_token
        return Completion(
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            prompt_token_ids=self.prompt,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            index=self.index,
            timing=Timing(first - self.arrival, self.finished - self.arrival),
            score=self.score,
        )
