"""The options of `icc bench serve`; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..settings import setting
from ..values import counts, json_object, lengths, numbers


@dataclass(frozen=True)
class LoadTestOptions:
    """A server, the loads to run on it one after the other, and the requests of these loads.

    rate: requests per second, open loop, one load per value. concurrency: requests at a time, closed loop, one load per
    value. prompt_tokens, output_tokens: smallest and largest number. extra: further fields of every request; None: no
    further ones.
    """

    url: str = setting("http://127.0.0.1:8000", "Where the server is.")
    model: str | None = setting(None, "What to ask for.", unset="the first that the server lists")
    api_key: str | None = setting(None, "Sent with every request.")
    chat: bool = setting(False, "Ask /v1/chat/completions.")
    rate: tuple[float, ...] = setting(
        (), "Requests per second, open loop; one load for each.", read=numbers, metavar="R,R"
    )
    burst: int = setting(1, "Requests that are due at once; 1 is a Poisson process.")
    concurrency: tuple[int, ...] = setting(
        (), "Requests at a time, closed loop; one load for each.", read=counts, metavar="N,N"
    )
    requests: int = setting(64, "Requests per load.")
    prompt_tokens: tuple[int, int] = setting((256, 256), "Or a range: 64:512.", read=lengths, metavar="N", unset="256")
    output_tokens: tuple[int, int] = setting((64, 64), "Or a range: 16:64.", read=lengths, metavar="N", unset="64")
    shared_tokens: int = setting(0, "Tokens that all prompts begin with.")
    stop_at_end: bool = setting(False, "Answers may be shorter than asked for (no ignore_eos).")
    extra: Mapping[str, Any] | None = setting(
        None, "Further fields of every request.", read=json_object, metavar="JSON", unset="none"
    )
    slo_ttft_ms: float = setting(1000.0, "Longest acceptable time to the first token.")
    slo_token_ms: float = setting(100.0, "Longest acceptable time per token.")
    price_per_hour: float | None = setting(None, "Price of the machine, for the cost per million tokens.")
    seed: int = setting(0, "Random seed of lengths, words and arrivals.")
    json_file: Path | None = setting(None, "Write all figures here.", metavar="FILE")
    traffic_file: Path | None = setting(
        None, "Write arrival times and lengths of one load's requests, for `icc plan --traffic`.", metavar="FILE"
    )
    html: Path | None = setting(None, "Write a report with curves here.", metavar="FILE")
