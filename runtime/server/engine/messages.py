"""What the HTTP process and the engine process tell each other: typed structs, MessagePack, 4-byte length prefixes."""

from __future__ import annotations

import msgspec

from ...format.adapters import AdapterRoom
from ...query import Query
from ...requests.params import SamplingParams
from ...requests.request import Standing
from ...requests.sampler import TokenLogprob
from .frames import MAX_FRAME

HEARTBEAT_S = 0.5  # an idle engine says that often that it lives


class Submit(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A prompt to complete, or to embed by an engine that embeds. `id` names it in every message about it; `grammar` is
    of `grammars.sources`, lowered; "" for none.

    prompt_logprobs: how many of the likeliest tokens to report per position of the prompt, None for no report.
    deadline: seconds after which what has not ended ends with the reason "deadline". skipped: so many of the first
    tokens are not pooled. extras: what the prompt gives per token besides ids, see `ScheduledSequence.extras`. adapter,
    adapter_scale: see `Query`. gives_kv, takes_kv: what is computed of the prompt goes to another engine, or comes from
    one under this name; kv_name: under which name it goes, a new one where that is empty; see KVTransfer. keep:
    beginnings of the prompt that are kept once they are computed, each as its tokens and for how many seconds after it
    was used last; see KeptPrompts.
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
        """A query as it is sent, without an id yet. standing: of its request; the extras are the query's."""
        return cls(
            0, tuple(query.token_ids), query.params, standing.priority, standing.client, standing.salt, query.grammar,
            prompt_logprobs, deadline, query.skipped, dict(query.extras), query.adapter,
            query.adapter_scale,
        )  # fmt: skip

    def query(self, vector: bool) -> Query:
        """The query that it is, of an engine that makes vectors or one that generates."""
        return Query(
            self.prompt, self.params, self.grammar, extras=self.extras, adapter=self.adapter,
            adapter_scale=self.adapter_scale, vector=vector,
            skipped=self.skipped,
        )  # fmt: skip

    @property
    def standing(self) -> Standing:
        """How the prompt stands among others."""
        begins = min((length for length, _ in self.keep), default=0)
        return Standing(self.priority, self.client, self.salt, self.extras, first_turn=begins)


class Cancel(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Nobody waits for this prompt's completions any more."""

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
    """Tell of what the prefix caches find, by KVChanged. plain: the salts of requests that give none themselves."""

    plain: list[bytes]


class TakeKV(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """KV that another engine gives under a name is there, of a prompt with this salt that will come when it is there as
    a whole; answered by KVTaken. See KVTransfer."""

    name: str
    salt: bytes


class DropKV(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """What another engine has given under a name is not taken any more: nobody waits for its prompt."""

    name: str


class KVTaken(msgspec.Struct, tag=20, array_like=True, frozen=True):
    """The KV of so many tokens was taken from another engine, in so many seconds."""

    tokens: int
    seconds: float


class KVChanged(msgspec.Struct, tag=18, array_like=True, frozen=True):
    """What has happened to the prefix caches, see `kv_wire`."""

    events: bytes


class KVGiven(msgspec.Struct, tag=19, array_like=True, frozen=True):
    """The KV of a prompt's first `length` tokens, in so many blocks, is there for another engine to take under a name,
    in a file that has so many bytes by now. Comes whenever there is more, and at last before the deltas that end the
    prompt."""

    id: int
    name: str
    length: int
    blocks: int
    nbytes: int = 0


class AdapterDone(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """What was asked about an adapter is done."""

    id: int


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """What one step gave to completion `index` of a prompt. The first one says how many of
    the prompt's tokens were found in the prefix cache and how long the prompt has waited, in seconds. `reason` ends the
    completion; `stop` is the stop string that did, if one; `score` comes with the end of what beams have found."""

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
    """Successive deltas of one completion as one."""
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
    """A prompt that could not be taken: `status` is the HTTP status for it."""

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
    healed: int = 0  # times that the KV bookkeeping was wrong and was made anew
    kept: int = 0  # beginnings of prompts that requests have asked to keep


class AdapterStats(msgspec.Struct, array_like=True, frozen=True):
    """How many adapters are in memory at once at most, the names of those that are, and of those that requests wait
    for."""

    slots: int
    resident: list[str]
    awaited: list[str]


class Report(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """One step: its deltas, the tokens and seconds it took (0 for a heartbeat). adapters: where they are told again."""

    deltas: list[Delta]
    stats: Stats
    step_tokens: int = 0
    step_s: float = 0.0
    adapters: AdapterStats | None = None


class Working(msgspec.Struct, tag=21, array_like=True, frozen=True):
    """The process has worked since it said so last, though the step that runs has not ended; see Pulse."""


class Ready(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """The engine is loaded."""

    num_blocks: int  # of all KV groups
    max_batch_size: int  # sequences
    load_s: float
    prefix_blocks: tuple[int, int] = (0, 0)  # see KVCache
    moves_kv: bool = False  # whether it gives and takes KV
    step_tokens: int = 0  # the most that a step takes
    identity: str = ""  # see identity_of
    adapters: AdapterRoom | None = None  # which fit; None where there is no room


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
