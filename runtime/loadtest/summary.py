"""Summary: the statistics of a load's traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .endpoint import Trace

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Slo:
    """A service level objective: the most milliseconds to the first token, and per token on average."""

    ttft_ms: float = 1000.0
    token_ms: float = 100.0


@dataclass(frozen=True)
class Summary:
    """Times in milliseconds, by percentile. Times count from when a request was due, so that a slow server is not
    hidden by a client that sends late. goodput: requests per second that met the SLO."""

    level: str
    requests: int
    ok: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    goodput_share: float
    ttft_ms: dict[str, float] = field(default_factory=dict)
    inter_token_ms: dict[str, float] = field(default_factory=dict)
    token_ms: dict[str, float] = field(default_factory=dict)
    e2e_ms: dict[str, float] = field(default_factory=dict)
    cost_per_million_output_tokens: float | None = None
    cost_per_million_tokens: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def summarize(level: str, traces: Sequence[Trace], slo: Slo, price_per_hour: float | None = None) -> Summary:
    """The summary of one load. price_per_hour: of the machine; None: costs are left out."""
    good = [trace for trace in traces if trace.ok]
    seconds = max((trace.end for trace in traces), default=0.0) - min((trace.due for trace in traces), default=0.0)
    seconds = max(seconds, 1e-9)
    ttft = [1e3 * (trace.pieces[0] - trace.due) for trace in good]
    per_token = [_per_token(trace) for trace in good]
    gaps = [1e3 * (after - before) for t in good for before, after in zip(t.pieces, t.pieces[1:], strict=False)]
    met = sum(first <= slo.ttft_ms and token <= slo.token_ms for first, token in zip(ttft, per_token, strict=True))
    inputs, outputs = sum(trace.prompt_tokens for trace in good), sum(map(_tokens, good))
    cost = None if price_per_hour is None else price_per_hour * seconds / 3600 * 1e6
    return Summary(
        level=level,
        requests=len(traces),
        ok=len(good),
        errors=dict(Counter(_why(trace) for trace in traces if not trace.ok)),
        seconds=seconds,
        prompt_tokens=inputs,
        output_tokens=outputs,
        cached_tokens=sum(trace.cached_tokens for trace in good),
        input_tokens_per_s=inputs / seconds,
        output_tokens_per_s=outputs / seconds,
        requests_per_s=len(good) / seconds,
        goodput_per_s=met / seconds,
        goodput_share=met / len(traces) if traces else 0.0,
        ttft_ms=_percentiles(ttft),
        inter_token_ms=_percentiles(gaps),
        token_ms=_percentiles(per_token),
        e2e_ms=_percentiles([1e3 * (trace.end - trace.due) for trace in good]),
        cost_per_million_output_tokens=None if cost is None or not outputs else cost / outputs,
        cost_per_million_tokens=None if cost is None or not outputs else cost / (inputs + outputs),
    )


def _tokens(trace: Trace) -> int:
    """The number of tokens of an answer; of text chunks if the server does not report its usage."""
    return trace.output_tokens or len(trace.pieces)


def _per_token(trace: Trace) -> float:
    """Mean milliseconds per token after the first."""
    count = max(_tokens(trace), 2)
    return 1e3 * (trace.pieces[-1] - trace.pieces[0]) / (count - 1)


def _why(trace: Trace) -> str:
    return str(trace.status) if trace.status not in (0, 200) else trace.error.partition(":")[0] or "no text"


def _percentiles(values: Iterable[float]) -> dict[str, float]:
    found = np.fromiter(values, dtype=np.float64)
    return {f"p{p}": float(np.percentile(found, p)) for p in PERCENTILES} if len(found) else {}
