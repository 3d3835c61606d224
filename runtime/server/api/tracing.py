"""Spans for OpenTelemetry (the extra `otel`): one per request, with children for its time in the queue, of prefill and
of decode.

Attributes have the names of OpenTelemetry's conventions for generative models, where these define one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ...errors import MissingExtraError
from ..log import current_request
from .run import Run

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter


class Tracer:
    """Makes the spans of requests that have ended; a caller's `traceparent` is their parent."""

    def __init__(self, model: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model = model
        self._provider: TracerProvider = TracerProvider(resource=Resource.create({"service.name": "icc"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("icc.serve")

    @classmethod
    def open(cls, model: str, endpoint: str) -> Tracer:
        """A Tracer that sends spans to an OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces.
        MissingExtraError without the libraries."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"--otlp-endpoint needs {error.name}, which is not installed", "pip install 'icc-llm[otel]'"
            ) from error
        return cls(model, OTLPSpanExporter(endpoint=endpoint))

    def request_ended(self, run: Run) -> None:
        """Record the spans of a request that ended, in whatever way."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        request = current_request.get()
        carrier = {"traceparent": request.traceparent} if request is not None else {}
        end = time.monotonic()
        zero = time.time_ns() - int(end * 1e9)  # wall time at 0 of the monotonic clock, in ns

        def at(seconds: float) -> int:
            return zero + int(seconds * 1e9)

        span = self._tracer.start_span(
            "llm_request",
            TraceContextTextMapPropagator().extract(carrier),
            trace.SpanKind.SERVER,
            self._attributes(run, request.id if request is not None else ""),
            start_time=at(run.started),
        )
        inside = trace.set_span_in_context(span)
        for name, begin, finish in _phases(run, end):
            self._tracer.start_span(name, inside, start_time=at(begin)).end(at(finish))
        if run.reason == "error":
            span.set_status(trace.StatusCode.ERROR)
        span.end(at(end))

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()

    def _attributes(self, run: Run, request_id: str) -> dict[str, Any]:
        params = run.job.submits[0].params
        asked = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.usage.input_tokens": run.job.prompt_tokens,
            "gen_ai.usage.output_tokens": run.output_tokens,
            "gen_ai.response.finish_reasons": run.reasons or [run.reason or "abort"],
            "icc.request_id": request_id,
        }
        return {name: value for name, value in asked.items() if value is not None}


def _phases(run: Run, end: float) -> list[tuple[str, float, float]]:
    """(name, begin, end) of each phase of a request, in seconds of the monotonic clock; a request without output was
    queued to its end."""
    if run.first is None:
        return [("queue", run.started, end)]
    begun = min(run.started + run.queued_s, run.first)
    return [("queue", run.started, begun), ("prefill", begun, run.first), ("decode", run.first, run.last)]
