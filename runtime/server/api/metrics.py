"""Metrics under the names and buckets that vLLM's dashboards use, with the prefix `icc:`, and again as `vllm:`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from ..engine.engine_client import EngineClient
from ..engine.messages import Report, Stats
from .run import Run

_PREFIX, _ALIAS = "icc:", "vllm:"
# bucket bounds of vLLM, so that its dashboards' quantiles mean the same
_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_NS = (1, 2, 5, 10, 20)

# what the page shows means of
_TIMES = {
    "ttft": "time_to_first_token_seconds",
    "gap": "inter_token_latency_seconds",
    "step": "iteration_seconds",
}


class Metrics:
    """All metrics of one server. Engine gauges and counters are read when they are asked for.

    generates: requests sample tokens; else they are embedded, and nothing is counted that only tokens have.
    """

    def __init__(self, model: str, engine: EngineClient | None = None, generates: bool = True) -> None:
        self._registry = CollectorRegistry()
        self._model, self._generates = model, generates
        self._totals = Stats()  # of engine processes that have ended
        self._last = Stats()
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens per step", _TOKENS)
        self._step_s = self._histogram("iteration_seconds", "Seconds per step", _STEP)
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to the first token", _TTFT)
        self._gap = self._histogram("inter_token_latency_seconds", "Time between tokens", _TOKEN)
        self._per_token = self._histogram("request_time_per_output_token_seconds", "Mean time per token", _TOKEN)
        self._total = self._histogram("e2e_request_latency_seconds", "Time to the last token", _LATENCY)
        self._queue = self._histogram("request_queue_time_seconds", "Time spent waiting", _LATENCY)
        self._prefill = self._histogram("request_prefill_time_seconds", "From the first step to a token", _LATENCY)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last", _LATENCY)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt", _LENGTHS)
        self._output = self._histogram("request_generation_tokens", "Tokens of an answer", _LENGTHS)
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for", _LENGTHS)
        self._n = self._histogram("request_params_n", "n asked for", _NS)
        labels = ("model_name", "finished_reason")
        self._ended = Counter(
            f"{_PREFIX}request_success", "Completions by how they ended", labels, registry=self._registry
        )
        self._refused = Counter(
            f"{_PREFIX}http_responses", "Answers by status", ("model_name", "status"), registry=self._registry
        )
        self._engine = engine
        self._live: list[tuple[Gauge, str]] = []
        for name, text, key in (
            ("num_requests_running", "Completions in the batch", "running"),
            ("num_requests_waiting", "Completions in the queue", "waiting"),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", "usage"),
            ("kv_blocks_cached", "KV blocks that hold a prefix that nobody uses now", "blocks_cached"),
            ("engine_ready", "Whether the engine is loaded", "ready"),
            ("engine_restarts", "Times that the engine process was started again", "restarts"),
        ):
            gauge = Gauge(f"{_PREFIX}{name}", text, ("model_name",), registry=self._registry)
            self._live.append((gauge, key))

    def attach(self, engine: EngineClient) -> None:
        self._engine = engine

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        metric = Histogram(f"{_PREFIX}{name}", text, ("model_name",), buckets=tuple(buckets), registry=self._registry)
        return metric.labels(self._model)

    def step(self, report: Report) -> None:
        """Take a report of the engine."""
        if report.stats.steps < self._last.steps:  # a new process counts from 0
            self._totals = _sum(self._totals, self._last)
        self._last = report.stats
        if report.step_tokens:
            self._step_tokens.observe(report.step_tokens)
            self._step_s.observe(report.step_s)

    def responded(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def request_ended(self, run: Run) -> None:
        """Take a request that ended, however it did."""
        unfinished = run.job.price.sequences - len(run.reasons)
        for reason in [*run.reasons, *[run.reason or "abort"] * unfinished]:
            self._ended.labels(self._model, reason).inc()
        params = run.job.submits[0].params
        for submit in run.job.submits:
            self._prompt.observe(len(submit.prompt))
        if self._generates:
            self._n.observe(params.n)
            self._max_tokens.observe(params.max_tokens)
        if run.first is None:
            return
        if not self._generates:
            self._queue.observe(run.queued_s)
            self._total.observe(run.last - run.started)
            return
        self._output.observe(run.output_tokens)
        self._ttft.observe(run.first - run.started)
        self._queue.observe(run.queued_s)
        self._prefill.observe(max(run.first - run.started - run.queued_s, 0.0))
        self._total.observe(run.last - run.started)
        self._decode.observe(run.last - run.first)
        for seconds, _ in run.gaps:
            self._gap.observe(seconds)
        if run.output_tokens > run.job.price.sequences:
            per_sequence = run.output_tokens / run.job.price.sequences - 1
            self._per_token.observe((run.last - run.first) / max(per_sequence, 1))

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        for gauge, key in self._live:
            gauge.labels(self._model).set(self._value(key))
        return generate_latest(_Both(self._registry, list(self._counters())))  # type: ignore[arg-type]

    def figures(self) -> dict[str, float]:
        """What the page shows."""
        totals = _sum(self._totals, self._last)
        figures = {key: self._value(key) for _, key in self._live}
        return (
            figures
            | self._times()
            | {
                "prompt_tokens": totals.prompt_tokens,
                "cached_tokens": totals.cached_tokens,
                "output_tokens": totals.output_tokens,
                "preemptions": totals.preemptions,
                "swaps": totals.swaps,
                "steps": totals.steps,
            }
        )

    def _times(self) -> dict[str, float]:
        """Sums and counts of what took how long, in seconds, from the histograms."""
        names = {
            f"{_PREFIX}{metric}_{end}": f"{name}_{'s' if end == 'sum' else end}"
            for name, metric in _TIMES.items()
            for end in ("sum", "count")
        }
        found = self._registry.restricted_registry(names).collect()
        return {names[sample.name]: sample.value for metric in found for sample in metric.samples}

    def _value(self, key: str) -> float:
        engine = self._engine
        if engine is None:
            return 0.0
        if key == "ready":
            return float(engine.facts is not None)
        if key == "restarts":
            return float(engine.restarts)
        if key == "usage":
            return engine.stats.blocks_used / engine.facts.num_blocks if engine.facts else 0.0
        return float(getattr(engine.stats, key))

    def _counters(self) -> Iterable[Metric]:
        totals = _sum(self._totals, self._last)
        for name, text, value in (
            ("num_preemptions", "Completions that lost their KV blocks for a while", totals.preemptions),
            ("num_swaps", "Preemptions whose KV was kept in host memory", totals.swaps),
            ("prompt_tokens", "Tokens of prompts", totals.prompt_tokens),
            ("generation_tokens", "Tokens sampled", totals.output_tokens),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache", totals.prompt_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache", totals.cached_tokens),
            ("engine_steps", "Steps", totals.steps),
            ("kv_healed", "Times that wrong KV bookkeeping was made anew", totals.healed),
        ):
            metric = Metric(f"{_PREFIX}{name}", text, "counter")
            metric.add_sample(f"{_PREFIX}{name}_total", {"model_name": self._model}, value)
            yield metric


class _Both:
    """A registry's families and some more, each under both prefixes."""

    def __init__(self, registry: CollectorRegistry, more: list[Metric]) -> None:
        self._registry, self._more = registry, more

    def collect(self) -> Iterable[Metric]:
        for metric in [*self._registry.collect(), *self._more]:
            yield metric
            alias = Metric(metric.name.replace(_PREFIX, _ALIAS, 1), metric.documentation, metric.type)
            alias.samples = [Sample(sample.name.replace(_PREFIX, _ALIAS, 1), *sample[1:]) for sample in metric.samples]
            yield alias


def _sum(first: Stats, second: Stats) -> Stats:
    """Two processes' counters together; gauges are not used."""
    return Stats(**{name: getattr(first, name) + getattr(second, name) for name in Stats.__struct_fields__})
