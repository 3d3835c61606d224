"""Metrics for Prometheus, with the prefix `icc:`; optionally also under vLLM's names, if vLLM has the metric.

Metrics that routers read always have vLLM's names too: the model server protocol of the Gateway API inference extension
(kubernetes-sigs/gateway-api-inference-extension, docs/proposals/003-model-server-protocol).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from ..engine.engine_client import EngineClient
from ..engine.engine_pool import EnginePool, total
from ..engine.messages import Report, Stats
from .prices import Prices
from .run import Run

# bucket bounds of vLLM, so that its dashboards' quantiles mean the same
_FIRST = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
]  # fmt: skip
_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
_LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
_STEP = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
_TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
_LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000]

_EMBEDDING = {
    "iteration_tokens": ("Tokens per step", _TOKENS),
    "iteration_seconds": ("Seconds per step", _STEP),
    "e2e_request_latency_seconds": ("Time to the end of the answer", _LATENCY),
    "request_queue_time_seconds": ("Time spent waiting", _LATENCY),
    "request_prompt_tokens": ("Tokens of a prompt", _LENGTHS),
}
_GENERATION = _EMBEDDING | {
    "time_to_first_token_seconds": ("Time to the first token", _FIRST),
    "inter_token_latency_seconds": ("Time between tokens", _TOKEN),
    "request_time_per_output_token_seconds": ("Mean time per token", _TOKEN),
    "request_prefill_time_seconds": ("From the first step to a token", _LATENCY),
    "request_decode_time_seconds": ("From the first token to the last", _LATENCY),
    "request_generation_tokens": ("Tokens of an answer", _LENGTHS),
    "request_params_max_tokens": ("max_tokens asked for", _LENGTHS),
    "request_params_n": ("n asked for", [1, 2, 5, 10, 20]),
}
_GAUGES = {
    "num_requests_running": ("Completions in the batch", "running"),
    "num_requests_waiting": ("Completions in the queue", "waiting"),
    "kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", "usage"),
    "kv_blocks_cached": ("KV blocks that hold a prefix that no request uses now", "blocks_cached"),
    "engine_ready": ("Engine processes that are loaded", "ready"),
    "prompts_kept": ("Prefixes of prompts that are kept because requests asked for it", "kept"),
}
_COUNTERS = {
    "engine_restarts": ("Times that the engine process was restarted", "restarts"),
    "engine_steps": ("Steps", "steps"),
    "num_preemptions": ("Completions that lost their KV blocks for a while", "preemptions"),
    "num_swaps": ("Preemptions whose KV was kept in host memory", "swaps"),
    "prompt_tokens": ("Tokens of prompts", "prompt_tokens"),
    "generation_tokens": ("Tokens sampled", "output_tokens"),
    "prefix_cache_queries": ("Tokens looked up in the prefix cache", "prompt_tokens"),
    "prefix_cache_hits": ("Tokens found in the prefix cache", "cached_tokens"),
    "kv_healed": ("Times that wrong KV bookkeeping was reset", "healed"),
}
_FIGURES = (
    "running", "waiting", "usage", "blocks_cached", "ready", "restarts",
    "prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "swaps", "steps",
)  # fmt: skip
# metrics that vLLM lacks; it has the others under the same names, except one (_RENAMED)
_OURS = {"iteration_seconds", "http_responses", "kv_blocks_cached", "kv_healed", "num_swaps"}
_OURS |= {"engine_ready", "engine_restarts", "engine_steps", "prompts_kept", "cost_saved"}
_ROUTED_BY = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}  # always under vLLM's names too
_LORA = "vllm:lora_requests_info"
_CACHE = "vllm:cache_config_info"
_RENAMED = {"iteration_tokens": "iteration_tokens_total"}

disable_created_metrics()  # no `_created` line for each series

# histograms of which the page shows means
_TIMES = {
    "ttft": "time_to_first_token_seconds",
    "gap": "inter_token_latency_seconds",
    "step": "iteration_seconds",
}


class Metrics:
    """All metrics of one server. Engine gauges and counters are read at each scrape.

    generates: whether requests sample tokens; if not, metrics of sampled tokens are left out. vllm: whether to use
    vLLM's names too. prices: give the cost that cached tokens have saved; None leaves that metric out.
    """

    def __init__(self, model: str, generates: bool = True, vllm: bool = False, prices: Prices | None = None) -> None:
        self._model, self._generates, self._vllm, self._prices = model, generates, vllm, prices
        self._engine: EnginePool | None = None
        self._ended_before: list[Stats] = []  # by replica: summed over processes that have ended
        self._last: list[Stats] = []
        self._registry = registry = CollectorRegistry()
        self._histograms: dict[str, Histogram] = {}
        for name, (text, buckets) in (_GENERATION if generates else _EMBEDDING).items():
            histogram = Histogram(f"icc:{name}", text, ["model_name"], buckets=buckets, registry=registry)
            self._histograms[name] = histogram.labels(model)
        ended, answered = "Completions by how they ended", "Answers by status"
        self._ended = Counter("icc:request_success", ended, ["model_name", "finished_reason"], registry=registry)
        self._answered = Counter("icc:http_responses", answered, ["model_name", "status"], registry=registry)

    def attach(self, engine: EnginePool) -> None:
        """Set the engine whose gauges and counters are read, and observe its steps."""
        self._engine = engine
        self._ended_before, self._last = ([Stats() for _ in engine.replicas] for _ in range(2))
        for replica in engine.replicas:
            replica.observe = partial(self.step, replica.number)

    def step(self, replica: int, report: Report) -> None:
        """Count a report of a replica."""
        if report.stats.steps < self._last[replica].steps:  # a new process counts from 0
            self._ended_before[replica] = total([self._ended_before[replica], self._last[replica]])
        self._last[replica] = report.stats
        if report.step_tokens:
            self._observe("iteration_tokens", report.step_tokens)
            self._observe("iteration_seconds", report.step_s)

    def responded(self, status: int) -> None:
        """Count a response by its HTTP status."""
        self._answered.labels(self._model, str(status)).inc()

    def request_ended(self, run: Run) -> None:
        """Count a request that ended, in whatever way."""
        unfinished = run.job.price.sequences - len(run.reasons)
        for reason in [*run.reasons, *[run.reason or "abort"] * unfinished]:
            self._ended.labels(self._model, reason).inc()
        for submit in run.job.submits:
            self._observe("request_prompt_tokens", len(submit.prompt))
        if self._generates:
            self._observe("request_params_n", run.job.submits[0].params.n)
            self._observe("request_params_max_tokens", run.job.submits[0].params.max_tokens)
        if run.first is None:
            return
        self._observe("request_queue_time_seconds", run.queued_s)
        self._observe("e2e_request_latency_seconds", run.last - run.started)
        if self._generates:
            self._tokens_ended(run, run.first)

    def _tokens_ended(self, run: Run, first: float) -> None:
        self._observe("request_generation_tokens", run.output_tokens)
        self._observe("time_to_first_token_seconds", first - run.started)
        self._observe("request_prefill_time_seconds", max(first - run.started - run.queued_s, 0.0))
        self._observe("request_decode_time_seconds", run.last - first)
        for seconds, _ in run.gaps:
            self._observe("inter_token_latency_seconds", seconds)
        if run.output_tokens > run.job.price.sequences:
            per_sequence = run.output_tokens / run.job.price.sequences - 1
            self._observe("request_time_per_output_token_seconds", (run.last - first) / max(per_sequence, 1))

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    # -- output ------------------------------------------------------------------------------------------------------

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Metric]:
        """All metrics, as prometheus_client asks of a collector."""
        yield from self._adapters()
        yield from self._cache()
        yield from self._saved()
        for metric in [*self._registry.collect(), *self._live()]:
            yield metric
            name = metric.name.removeprefix("icc:")
            if (self._vllm and name not in _OURS) or name in _ROUTED_BY:
                alias = Metric(f"vllm:{_RENAMED.get(name, name)}", metric.documentation, metric.type)
                alias.samples = [_renamed(sample, metric.name, alias.name) for sample in metric.samples]
                yield alias

    def figures(self) -> dict[str, float]:
        """The values that the page shows, by name."""
        values = self._values()
        return {key: values[key] for key in _FIGURES} | self._times()

    def _times(self) -> dict[str, float]:
        """Sums in seconds, and counts, of the histograms of times."""
        names = {
            f"icc:{metric}_{end}": f"{name}_{'s' if end == 'sum' else end}"
            for name, metric in _TIMES.items()
            for end in ("sum", "count")
        }
        found = self._registry.restricted_registry(names).collect()
        return {names[sample.name]: sample.value for metric in found for sample in metric.samples}

    def _adapters(self) -> Iterator[Metric]:
        """vLLM's gauge of adapters, always under vLLM's name; routers read it to send a request where its adapter is.
        Its value is the time of the scrape, in seconds since 1970, as in vLLM."""
        found = None if self._engine is None else self._engine.adapters
        if found is None:
            return
        metric = Metric(_LORA, "Adapters in memory, those that requests wait for, and how many fit", "gauge")
        labels = {"running_lora_adapters": found.resident, "waiting_lora_adapters": found.awaited}
        shown = {name: ",".join(names) for name, names in labels.items()}
        metric.add_sample(_LORA, {"max_lora": str(found.slots), **shown}, time.time())
        yield metric

    def _cache(self) -> Iterator[Metric]:
        """vLLM's gauge of the size of the KV cache: the blocks of all replicas that are ready. A block is the number of
        tokens by which cached prefixes grow."""
        ready = [] if self._engine is None else [facts.prefix_blocks for facts in self._engine.ready]
        if not ready:
            return
        metric = Metric(_CACHE, "Tokens of a block of the KV cache, and how many blocks there are", "gauge")
        labels = {"block_size": str(ready[0][0]), "num_gpu_blocks": str(sum(blocks for _, blocks in ready))}
        metric.add_sample(_CACHE, {**labels, "model_name": self._model, "engine": "0"}, 1.0)
        yield metric

    def _saved(self) -> Iterator[Metric]:
        """The cost that the prefix cache has saved."""
        if self._prices is None:
            return
        metric = Metric("icc:cost_saved", "What cached tokens of prompts have saved, by --prices", "counter")
        labels = {"model_name": self._model, "currency": self._prices.currency}
        metric.add_sample("icc:cost_saved_total", labels, self._prices.saved(int(self._values()["cached_tokens"])))
        yield metric

    def _live(self) -> Iterator[Metric]:
        """Engine gauges and counters, of all replicas together, and of each if there are several."""
        replicas = self._engine.replicas if self._engine is not None else []
        shown = [("icc:", {}, self._values())]
        if len(replicas) > 1:
            numbered = [("icc:replica_", {"replica": str(one.number)}, self._values_of([one])) for one in replicas]
            shown += numbered
        found: dict[str, Metric] = {}
        for prefix, labels, values in shown:
            for kind, suffix, table in (("gauge", "", _GAUGES), ("counter", "_total", _COUNTERS)):
                for name, (text, key) in table.items():
                    metric = found.setdefault(prefix + name, Metric(prefix + name, text, kind))
                    metric.add_sample(f"{prefix}{name}{suffix}", {"model_name": self._model, **labels}, values[key])
        yield from found.values()

    def _values(self) -> dict[str, float]:
        return self._values_of(self._engine.replicas if self._engine is not None else [])

    def _values_of(self, replicas: Sequence[EngineClient]) -> dict[str, float]:
        """For these replicas: gauges of the running engine processes, and counters that include processes that have
        ended."""
        stats = total([replica.stats for replica in replicas])
        ran = total([kept[replica.number] for replica in replicas for kept in (self._ended_before, self._last)])
        ready = [replica.facts for replica in replicas if replica.facts is not None]
        return {name: float(getattr(ran, name)) for name in Stats.__struct_fields__} | {
            "running": float(stats.running),
            "waiting": float(stats.waiting),
            "blocks_cached": float(stats.blocks_cached),
            "kept": float(stats.kept),
            "usage": stats.blocks_used / blocks if (blocks := sum(facts.num_blocks for facts in ready)) else 0.0,
            "ready": float(len(ready)),
            "restarts": float(sum(replica.restarts for replica in replicas)),
        }


def _renamed(sample: Sample, old: str, new: str) -> Sample:
    return sample._replace(name=sample.name.replace(old, new, 1), labels={**sample.labels, "engine": "0"})
