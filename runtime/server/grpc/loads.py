"""What the replicas have to do, as routers ask for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from smg_grpc_proto import vllm_engine_pb2 as pb

from ..engine.engine_client import EngineClient

# what routers ask engines for; here all is in the first, which they get whatever they ask for
SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})
_LEAST_S = 1.0  # over which a rate is taken


@dataclass
class _Sample:
    """Tokens that a replica had generated at a time, in seconds of `time.monotonic`."""

    at: float
    tokens: int


class ReplicaLoads:
    """The loads of replicas. Their rates are over the time between two samples, which this takes as it is asked."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}
        self._rates: dict[int, float] = {}

    def load(self, replica: EngineClient) -> pb.SchedulerLoad:
        """What a replica runs and waits for, the use of its KV cache, and what it lately gave.

        num_waiting_uncached_tokens: of prompts from which nothing has come yet, as far as known without what the cache
        finds; num_used_tokens: the share of KV blocks in use, times the tokens that the cache holds.
        """
        stats, facts = replica.stats, replica.facts
        blocks = 0 if facts is None else facts.num_blocks
        used = stats.blocks_used / blocks if blocks else 0.0
        capacity = 0 if facts is None else facts.prefix_blocks[0] * facts.prefix_blocks[1]
        slots = 0 if facts is None else facts.max_batch_size
        pending = [prompt for prompt in replica.open if not prompt.begun]
        return pb.SchedulerLoad(
            dp_rank=replica.number,
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_total_reqs=stats.running + stats.waiting,
            num_used_tokens=round(used * capacity),
            max_total_num_tokens=capacity,
            token_usage=used,
            gen_throughput=self._rate(replica),
            cache_hit_rate=stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
            utilization=stats.running / slots if slots else 0.0,
            max_running_requests=slots,
            num_waiting_uncached_tokens=sum(prompt.cost or len(prompt.submit.prompt) for prompt in pending),
        )

    def _rate(self, replica: EngineClient) -> float:
        """Tokens per second since the last sample but for one that is too young; a process that is new counts anew."""
        now, tokens, last = time.monotonic(), replica.stats.output_tokens, self._samples.get(replica.number)
        if last is None or tokens < last.tokens:
            self._samples[replica.number] = _Sample(now, tokens)
            self._rates[replica.number] = 0.0
        elif now - last.at >= _LEAST_S:
            self._rates[replica.number] = (tokens - last.tokens) / (now - last.at)
            self._samples[replica.number] = _Sample(now, tokens)
        return self._rates[replica.number]
