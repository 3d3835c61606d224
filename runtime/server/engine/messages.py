"""The messages between the HTTP process and the engine process: typed structs, MessagePack, 4-byte length prefixes."""

from __future__ import annotations

import msgspec

from ...format.adapters import AdapterRoom
from ...query import Query
from ...requests.params import SamplingParams
from ...requests.request import Standing
from ...requests.sampler import TokenLogprob
from .frames import MAX_FRAME

HEARTBEAT_S = 0.5  # how often an idle engine reports


class Submit(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A prompt to complete, or to embed by an embedding engine. `id` names it in all messages about it; `grammar`: a
    lowered text of `grammars.sources`, "" for none.

    prompt_logprobs: how many of the likeliest tokens to report per position of the prompt, None for no report.
    deadline: seconds after which unfinished completions end with the reason "deadline". skipped: how many of the first
    tokens are not pooled. extras: inputs per token besides ids, see `ScheduledSequence.extras`. adapter, adapter_scale:
    see `Query`. gives_kv: whether to publish the prompt's KV for another engine; kv_name: under which name, "" for a
    new one; takes_kv: the name of KV to take from another engine, "" for none; see KVTransfer. keep: prefixes of the
    prompt to keep once they are computed, each as (tokens, seconds after the last use); see KeptPrompts.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    client: str = ""
    salt: bytes = b""
    grammar: str = ""
    prompt_logprobs: int | None = None
    deadline: float | None = None
    skipped: int = 0
    extras: dict[str, bytes] = {}
    adapter: str = ""
    adapter_scale: float = 1.0
    gives_kv: bool = False
    takes_kv: str = ""
    keep: tuple[tuple[int, float], ...] = ()
    kv_name: str = ""

    @classmethod
    def of(
        cls, query: Query, standing: Standing, deadline: float | None = None, prompt_logprobs: int | None = None
    ) -> Submit:
        """The message for a query, with id 0 for now. standing: of its request; the extras are the query's."""
        return cls(
            0, tuple(query.token_ids), query.params, standing.priority, standing.client, standing.salt, query.grammar,
            prompt_logprobs, deadline, query.skipped, dict(query.extras), query.adapter,
            query.adapter_scale,
        )  # fmt: skip

    def query(self, vector: bool) -> Query:
        """The query of the prompt. vector: whether the engine computes vectors instead of tokens."""
        return Query(
            self.prompt, self.params, self.grammar, extras=self.extras, adapter=self.adapter,
            adapter_scale=self.adapter_scale, vector=vector,
            skipped=self.skipped,
        )  # fmt: skip

    @property
    def standing(self) -> Standing:
        """The prompt's standing in the queue."""
        begins = min((length for length, _ in self.keep), default=0)
        return Standing(self.priority, self.client, self.salt, self.extras, first_turn=begins)


class Cancel(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Cancel a prompt: its completions are no longer wanted."""

    id: int


class LoadAdapter(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Read the adapter at `path`, for prompts to name; answered by AdapterDone or Failed."""

    id: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Forget an adapter; answered by AdapterDone or Failed."""

    id: int
    name: str


class WatchKV(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Send KVChanged when the prefix caches change. plain: the salts of requests without a cache_salt."""

    plain: list[bytes]


class TakeKV(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Take the KV so far that another engine gives under a name; the prompt itself, with this salt, comes when all is
    there. Answered by KVTaken. See KVTransfer."""

    name: str
    salt: bytes


class DropKV(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Stop taking the KV under a name: its prompt was cancelled."""

    name: str


class KVTaken(msgspec.Struct, tag=20, array_like=True, frozen=True):
    """How many tokens' KV was taken from another engine, and in how many seconds."""

    tokens: int
    seconds: float


class KVChanged(msgspec.Struct, tag=18, array_like=True, frozen=True):
    """Changes of the prefix caches, encoded as in `kv_wire`."""

    events: bytes


class KVGiven(msgspec.Struct, tag=19, array_like=True, frozen=True):
    """The KV of a prompt's first `length` tokens, in `blocks` blocks, can be taken by another engine under a name; its
    file has `nbytes` bytes so far. Sent whenever there is more, the last time before the deltas that end the prompt."""

    id: int
    name: str
    length: int
    blocks: int
    nbytes: int = 0


class AdapterDone(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """An adapter was loaded or unloaded; id: of that request."""

    id: int


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """The output of one step for completion `index` of a prompt. The first delta says how many of the prompt's tokens
    were found in the prefix cache (`cached`, else None) and how long the prompt was queued, in seconds. `reason`: why
    the completion ends, None if it goes on; `stop`: the stop string that ended it, None for none; `score`: at the end
    of a beam search's completion, else None."""

    id: int
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    cached: int | None = None
    queued_s: float = 0.0
    reason: str | None = None
    stop: str | None = None
    score: float | None = None


def merge(deltas: list[Delta]) -> Delta:
    """Consecutive deltas of one completion, merged."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    return Delta(
        first.id,
        first.index,
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join([delta.text for delta in deltas]),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
        first.cached,
        first.queued_s,
        last.reason,
        last.stop,
        last.score,
    )


class PromptLogprobs(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """Log-probabilities of a prompt's tokens from the second on; comes before its completions' deltas."""

    id: int
    logprobs: tuple[TokenLogprob, ...]


class Embedded(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """The vector of a prompt, float32 in little-endian order; comes before the delta that ends the prompt."""

    id: int
    vector: bytes


class Failed(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """A prompt that was refused or has failed, or a request about an adapter that failed. status: the HTTP status for
    it."""

    id: int
    status: int
    message: str
    field: str = ""


class Stats(msgspec.Struct, array_like=True, frozen=True):
    """The engine's gauges, and its counters since it started."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    preemptions: int = 0
    swaps: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    healed: int = 0  # times that the KV bookkeeping was wrong and was reset
    kept: int = 0  # prompt prefixes that are kept at the request of clients


class AdapterStats(msgspec.Struct, array_like=True, frozen=True):
    """slots: how many adapters fit in memory at once. resident: names of adapters in memory. awaited: names of adapters
    that requests wait for."""

    slots: int
    resident: list[str]
    awaited: list[str]


class Report(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """The output of one step: its deltas, and its tokens and seconds (0 for a heartbeat). adapters: None if they are
    not reported this time."""

    deltas: list[Delta]
    stats: Stats
    step_tokens: int = 0
    step_s: float = 0.0
    adapters: AdapterStats | None = None


class Working(msgspec.Struct, tag=21, array_like=True, frozen=True):
    """The process has used CPU time since the last such message, though the current step has not ended; see Pulse."""


class Ready(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """The engine is loaded."""

    num_blocks: int  # of all KV groups
    max_batch_size: int  # sequences
    load_s: float
    prefix_blocks: tuple[int, int] = (0, 0)  # see KVCache
    moves_kv: bool = False  # whether KVTransfer works
    step_tokens: int = 0  # the most tokens of a step
    identity: str = ""  # see identity_of
    adapters: AdapterRoom | None = None  # which adapters fit; None if it holds none


class Fatal(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """The engine could not be loaded."""

    message: str
    hint: str
    exit_code: int


ToEngine = Submit | Cancel | LoadAdapter | UnloadAdapter | WatchKV | TakeKV | DropKV
FromEngine = (
    Report | Failed | PromptLogprobs | Embedded | Ready | Fatal | AdapterDone | KVChanged | KVGiven | KVTaken | Working
)

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine) -> bytes:
    """A message as a frame."""
    body = _encoder.encode(message)
    assert len(body) <= MAX_FRAME, len(body)
    return len(body).to_bytes(4, "little") + body
