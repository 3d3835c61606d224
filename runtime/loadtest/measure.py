"""Measures a server under the requested loads and reports the results."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import IccError, UsageError
from ..progress.display import Display
from ..progress.stream import open_display
from .endpoint import Endpoint, Trace
from .load import Level, Mix, PromptMaker, run_level, tokens_per_word
from .options import LoadTestOptions
from .report import as_html, as_table
from .summary import Slo, Summary, summarize

_WITHOUT = {
    "ignore_eos": "answers may be shorter than asked for",
    "stream_options": "tokens are counted by pieces of text, and prompts by words",
}


def measure(options: LoadTestOptions, as_json: bool = False) -> int:
    """Run the loads on the server and print the results; the exit code is 1 if a load got no answer.

    as_json: print one JSON value. IccError if the options define no load, or if the server does not answer.
    """
    extra = {**({} if options.stop_at_end else {"ignore_eos": True}), **(options.extra or {})}
    endpoint = Endpoint(options.url, options.model or "", chat=options.chat, key=options.api_key, extra=extra)
    levels = [Level(rate=rate, burst=options.burst) for rate in options.rate]
    levels += [Level(concurrency=count) for count in options.concurrency]
    if not levels:
        raise UsageError("there is no load", "give --rate or --concurrency")
    if options.traffic_file is not None and len(levels) != 1:
        raise UsageError(
            f"--traffic-file takes requests of one load, there are {len(levels)}", "give one --rate or --concurrency"
        )
    try:
        with open_display() as display:
            summaries = asyncio.run(_measure(endpoint, levels, options, as_json, display))
    except OSError as error:
        raise IccError(f"{options.url}: {error}") from error
    _report(options, endpoint, summaries, as_json)
    return 0 if all(summary.ok for summary in summaries) else 1


async def _measure(
    endpoint: Endpoint, levels: list[Level], options: LoadTestOptions, as_json: bool, display: Display
) -> list[Summary]:
    if not endpoint.model:
        endpoint.model = await endpoint.find_model()
    ratio = await tokens_per_word(endpoint)
    for name in sorted(endpoint.left_out):
        print(f"warning: the server refuses {name}: {_WITHOUT[name]}", file=sys.stderr)
    mix = Mix(options.prompt_tokens, options.output_tokens, options.shared_tokens)
    slo = Slo(options.slo_ttft_ms, options.slo_token_ms)
    summaries = []
    for number, level in enumerate(levels):
        prompts = PromptMaker(mix, options.seed + number, ratio)
        with display.stage(level.name) as progress:
            traces = await run_level(endpoint, level, prompts, options.requests, options.seed, progress)
        if options.traffic_file is not None:
            _write_traffic(options.traffic_file, traces)
        summaries.append(summarize(level.name, traces, slo, options.price_per_hour))
        if not as_json:
            print(as_table(summaries[-1:]), flush=True)
    return summaries


def _report(options: LoadTestOptions, endpoint: Endpoint, summaries: list[Summary], as_json: bool) -> None:
    facts = {
        "server": options.url,
        "model": endpoint.model,
        "prompt tokens": _shown(options.prompt_tokens),
        "output tokens": _shown(options.output_tokens),
        "shared prompt tokens": str(options.shared_tokens),
        "requests per load": str(options.requests),
        "left out": ", ".join(sorted(endpoint.left_out)) or "nothing",
        "SLO": f"TTFT {options.slo_ttft_ms:g} ms, {options.slo_token_ms:g} ms per token",
    }
    found = {"facts": facts, "loads": [summary.as_json() for summary in summaries]}
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(found, indent=1) + "\n")
    if options.html is not None:
        options.html.write_text(as_html(f"Load on {endpoint.model}", facts, summaries))
    print(json.dumps(found) if as_json else "\n" + as_table(summaries))


def _write_traffic(path: Path, traces: Sequence[Trace]) -> None:
    """Write the answered requests as JSON lines, which server/sizing/traffic.py reads."""
    good = sorted((trace for trace in traces if trace.ok), key=lambda trace: trace.due)
    lines = [
        {"time": trace.due - good[0].due, "prompt_tokens": trace.prompt_tokens, "output_tokens": trace.output_tokens}
        for trace in good
        if trace.prompt_tokens and trace.output_tokens
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _shown(lengths: tuple[int, int]) -> str:
    return str(lengths[0]) if lengths[0] == lengths[1] else f"{lengths[0]} to {lengths[1]}"
