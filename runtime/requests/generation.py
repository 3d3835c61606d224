"""What goes into a generation and what comes out of it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..batch.scheduled import StepOutcome, Verdict
from ..loop.sampler import Sample, Sampler, TokenLogprob
from .params import SamplingParams

if TYPE_CHECKING:
    from ..speculate.verify import Walk
    from ..tokenizer import Detokenizer, StopFinder


@dataclass(frozen=True, slots=True)
class Standing:
    """How a request stands among others: a lower priority runs first, clients (API keys) of equal priority are served
    fairly, and only requests of one salt share KV blocks."""

    priority: int = 0
    client: str = ""
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the arrival of a request: `ttft` to its first token, `total` to its end."""

    ttft: float
    total: float


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion of one prompt.

    finish_reason: "stop" (end token, stop id or stop string), "length" (max_tokens or the engine's max_seq_len),
    "abort", or "error" (the model's logits were not numbers; the tokens before are kept). `token_ids` include the token
    that ended it, `text` does not. `logprobs` are per token, if wanted. `index` counts the completions of one prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    index: int = 0
    timing: Timing = field(default=Timing(0.0, 0.0), compare=False)


@dataclass(frozen=True, slots=True)
class Output:
    """At most one token that a step gave to one request, and the text that became safe to show."""

    request_id: int
    token_id: int | None
    text: str = ""
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a step, None where the logits were not numbers, and the text that it made safe to show."""

    sample: Sample | None
    text: str


@dataclass(slots=True, eq=False)
class Generation:
    """A request under way: its sampler, its text so far, and the outputs that nobody has taken yet.

    `detokenizer` and `stop_finder` are None in an engine without tokenizer. `end_ids` are the tokens that end it.
    """

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    sampler: Sampler
    end_ids: frozenset[int]
    detokenizer: Detokenizer | None
    stop_finder: StopFinder | None
    arrival: float
    index: int = 0
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache; None before the first step
    queued_s: float = 0.0  # from its arrival to its first step
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    outputs: deque[Output] = field(default_factory=deque)
    first_token: float | None = None
    finished: float | None = None
    finish_reason: str | None = None
    fault: Exception | None = None  # what ended it with "error", unless that were logits that are not numbers

    def take(self, walk: Walk) -> tuple[StepOutcome, list[Piece]]:
        """Take the tokens of a step one by one, as far as the request goes on."""
        pieces: list[Piece] = []
        sample = None
        for number, sample in enumerate(walk.samples):
            accepted = walk.accepted[:number]
            if sample is None:
                return StepOutcome(self.request_id, None, Verdict.ERROR, accepted), [*pieces, Piece(None, "")]
            try:
                verdict, text = self.accept(sample)
            except Exception as error:  # of the tokenizer, on this request's tokens: the others go on
                self.fault = error
                return StepOutcome(self.request_id, None, Verdict.ERROR, accepted), [*pieces, Piece(None, "")]
            pieces.append(Piece(sample, text))
            if verdict is not Verdict.CONTINUE:
                break
        assert sample is not None
        return StepOutcome(self.request_id, sample.token_id, verdict, accepted), pieces

    def emit(self, pieces: list[Piece], reason: str | None) -> list[Output]:
        """One output per token; the last ends the request if there is a reason."""
        outputs: list[Output] = []
        for piece in pieces[:-1]:
            assert piece.sample is not None
            outputs.append(Output(self.request_id, piece.sample.token_id, piece.text, piece.sample.logprob))
        self.outputs += outputs
        sample, text = pieces[-1].sample, pieces[-1].text
        token, logprob = (None, None) if sample is None else (sample.token_id, sample.logprob)
        if reason in ("length", "error"):
            text += self._last_words()
        if reason is not None:
            return [*outputs, self.finish(reason, text, token, logprob)]
        outputs.append(Output(self.request_id, token, text, logprob))
        self.outputs.append(outputs[-1])
        return outputs

    def finish(
        self, reason: str, text: str = "", token: int | None = None, logprob: TokenLogprob | None = None
    ) -> Output:
        """End the request; its last output."""
        self.finish_reason = reason
        self.finished = time.perf_counter()
        self.outputs.append(Output(self.request_id, token, text, logprob, reason))
        return self.outputs[-1]

    def _last_words(self) -> str:
        try:
            return self.flush()
        except Exception as error:  # a detokenizer that has failed once may do so again
            self.fault = self.fault or error
            return ""

    def accept(self, sample: Sample) -> tuple[Verdict, str]:
        """Take a sampled token: whether the request goes on, and the text that the token made safe to show."""
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
        """The result; requires that the request has finished. Raises the fault that ended it."""
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
        )
