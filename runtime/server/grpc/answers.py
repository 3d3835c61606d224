"""Makes the responses of Generate from the engine's deltas: chunks if it streams, and the end of each completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET
from smg_grpc_proto import vllm_engine_pb2 as pb

from ...requests.sampler import TokenLogprob
from ..api.answers import by_choice
from ..api.jobs import Job
from ..api.transfers import transfer_of
from ..engine.engine_stream import EngineStream
from ..engine.messages import Delta

# The protocol has "stop", "length", "abort" and "error"; other reasons become "abort".
_REASONS = {"deadline": "abort"}


@dataclass
class _Completion:
    """The output of one completion so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: int = 0
    ended: bool = False


class GenerateAnswer:
    """Makes the responses of one job, which has one prompt.

    streamed: whether there are chunks; the last message of a completion holds all of its tokens in any case.
    """

    def __init__(self, job: Job, stream: EngineStream, streamed: bool) -> None:
        self._job, self._stream, self._streamed = job, stream, streamed
        params = job.submits[0].params
        self._most, self._stop_ids = params.logprobs, frozenset(params.stop_token_ids)
        self._completions = [_Completion() for _ in range(params.n)]

    def responses(self, deltas: Sequence[Delta]) -> Iterator[pb.GenerateResponse]:
        """The responses for new deltas. EngineFailed if the model failed."""
        for delta in by_choice(deltas):
            one = self._completions[delta.index]
            first = not one.token_ids
            one.token_ids += delta.token_ids
            one.logprobs += delta.logprobs
            one.cached += delta.cached or 0
            if self._streamed and delta.token_ids:
                yield self._chunk(delta, one, first)
            if delta.reason is not None:
                yield self._complete(delta.index, delta.reason, delta.stop)

    def aborted(self) -> Iterator[pb.GenerateResponse]:
        """The last message of every completion that has not ended."""
        for index, one in enumerate(self._completions):
            if not one.ended:
                yield self._complete(index, "abort", None)

    def _chunk(self, delta: Delta, one: _Completion, first: bool) -> pb.GenerateResponse:
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._job.prompt_tokens,
            completion_tokens=len(delta.token_ids),
            cached_tokens=one.cached,
            output_logprobs=self._output(delta.logprobs),
            input_logprobs=self._input() if first else None,
            index=delta.index,
        )
        return pb.GenerateResponse(chunk=chunk)

    def _complete(self, index: int, reason: str, stop: str | None) -> pb.GenerateResponse:
        one = self._completions[index]
        one.ended = True
        complete = pb.GenerateComplete(
            output_ids=one.token_ids,
            finish_reason=_REASONS.get(reason, reason),
            prompt_tokens=self._job.prompt_tokens,
            completion_tokens=len(one.token_ids),
            cached_tokens=one.cached,
            output_logprobs=self._output(one.logprobs),
            input_logprobs=self._input(),
            index=index,
        )
        if stop is not None:
            complete.matched_stop_str = stop
        elif reason == "stop" and one.token_ids and one.token_ids[-1] in self._stop_ids:
            complete.matched_token_id = one.token_ids[-1]
        transfer = transfer_of(self._stream)
        if transfer is not UNSET:
            complete.kv_transfer_params_json = msgspec.json.encode(transfer).decode()
        return pb.GenerateResponse(complete=complete)

    def _output(self, entries: Iterable[TokenLogprob]) -> pb.OutputLogProbs | None:
        entries = list(entries)
        if not entries or self._most is None:
            return None
        return pb.OutputLogProbs(
            token_logprobs=[entry.logprob for entry in entries],
            token_ids=[entry.token_id for entry in entries],
            top_logprobs=[_top(entry, self._most) for entry in entries] if self._most else (),
        )

    def _input(self) -> pb.InputLogProbs | None:
        """The log-probabilities of the prompt, without a value for the first token; None if they were not requested."""
        submit, most = self._job.submits[0], self._job.prompt_logprobs
        if submit.prompt_logprobs is None:
            return None
        scored = self._stream.prompt_logprobs.get(self._stream.first_id)
        entries = scored.logprobs if scored else ()
        values = [pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=entry.logprob) for entry in entries)]
        return pb.InputLogProbs(
            token_logprobs=values,
            token_ids=submit.prompt,
            top_logprobs=[pb.TopLogProbs(), *(_top(entry, most) for entry in entries)] if most else (),
        )


def _top(entry: TokenLogprob, most: int) -> pb.TopLogProbs:
    top = entry.top[:most]
    return pb.TopLogProbs(values=[value for _, value in top], token_ids=[token for token, _ in top])
