"""`icc bench serve`: the options of the load tool."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import IccError, UsageError
from .endpoint import Endpoint
from .load import Level, Mix, Prompts, run_level, tokens_per_word
from .report import as_html, as_table
from .summary import Slo, Summary, summarize

_WITHOUT = {
    "ignore_eos": "answers may be shorter than asked for",
    "stream_options": "tokens are counted by pieces of text, and prompts by words",
}


def main(argv: Sequence[str], prog: str | None = None) -> int:
    """Measure a server; the exit code. IccErrors for a wrong option or a server that does not answer."""
    arguments = _parser(prog).parse_args(argv)
    try:
        extra = json.loads(arguments.extra)
    except ValueError as error:
        raise UsageError(f"--extra: {error}") from error
    if not isinstance(extra, dict):
        raise UsageError("--extra must be a JSON object")
    if not arguments.stop_at_end:
        extra = {"ignore_eos": True, **extra}
    endpoint = Endpoint(arguments.url, arguments.model or "", chat=arguments.chat, key=arguments.api_key, extra=extra)
    levels = [Level(rate=rate, burst=arguments.burst) for rate in arguments.rate]
    levels += [Level(concurrency=count) for count in arguments.concurrency]
    if not levels:
        raise UsageError("there is no load", "give --rate or --concurrency")
    try:
        summaries = asyncio.run(_measure(endpoint, levels, arguments))
    except OSError as error:
        raise IccError(f"{arguments.url}: {error}") from error
    _report(arguments, endpoint, summaries)
    return 0 if all(summary.ok for summary in summaries) else 1


async def _measure(endpoint: Endpoint, levels: list[Level], arguments: argparse.Namespace) -> list[Summary]:
    if not endpoint.model:
        endpoint.model = await endpoint.find_model()
    ratio = await tokens_per_word(endpoint)
    for name in sorted(endpoint.left_out):
        print(f"warning: the server refuses {name}: {_WITHOUT[name]}", file=sys.stderr)
    mix = Mix(arguments.prompt_tokens, arguments.output_tokens, arguments.shared_tokens)
    slo = Slo(arguments.slo_ttft_ms, arguments.slo_token_ms)
    summaries = []
    for number, level in enumerate(levels):
        prompts = Prompts(mix, arguments.seed + number, ratio)
        traces = await run_level(endpoint, level, prompts, arguments.requests, arguments.seed)
        summaries.append(summarize(level.name, traces, slo, arguments.price_per_hour))
        if not arguments.as_json:
            print(as_table(summaries[-1:]), flush=True)
    return summaries


def _report(arguments: argparse.Namespace, endpoint: Endpoint, summaries: list[Summary]) -> None:
    facts = {
        "server": arguments.url,
        "model": endpoint.model,
        "prompt tokens": _shown(arguments.prompt_tokens),
        "output tokens": _shown(arguments.output_tokens),
        "shared prompt tokens": str(arguments.shared_tokens),
        "requests per load": str(arguments.requests),
        "left out": ", ".join(sorted(endpoint.left_out)) or "nothing",
        "SLO": f"TTFT {arguments.slo_ttft_ms:g} ms, {arguments.slo_token_ms:g} ms per token",
    }
    found = {"facts": facts, "loads": [summary.as_json() for summary in summaries]}
    if arguments.json_file is not None:
        arguments.json_file.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.html is not None:
        arguments.html.write_text(as_html(f"Load on {endpoint.model}", facts, summaries))
    print(json.dumps(found) if arguments.as_json else "\n" + as_table(summaries))


def _shown(lengths: tuple[int, int]) -> str:
    return str(lengths[0]) if lengths[0] == lengths[1] else f"{lengths[0]} to {lengths[1]}"


def _lengths(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no length like 256, or range like 64:512")
    return found


def _numbers(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [0.0]
    if min(found) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive numbers like 1,2,4")
    return found


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{prog or 'icc'} bench serve", description="Measure an OpenAI endpoint.")
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add("--model", help="default: the first that the server lists")
    add("--api-key")
    add("--chat", action="store_true", help="ask /v1/chat/completions")
    add("--rate", type=_numbers, default=[], help="requests per second, open loop; several loads: 1,2,4")
    add("--burst", type=int, default=1, help="requests that are due at once (1: a Poisson process)")
    counts = lambda text: [int(value) for value in _numbers(text)]  # noqa: E731
    add("--concurrency", type=counts, default=[], help="requests at a time, closed loop; several loads: 1,8,16")
    add("--requests", type=int, default=64, help="per load")
    add("--prompt-tokens", type=_lengths, default=(256, 256), help="256, or a range: 64:512")
    add("--output-tokens", type=_lengths, default=(64, 64))
    add("--shared-tokens", type=int, default=0, help="a beginning that all prompts share")
    add("--stop-at-end", action="store_true", help="answers may be shorter than asked for (no ignore_eos)")
    add("--extra", default="{}", metavar="JSON", help="more fields of every request")
    add("--slo-ttft-ms", type=float, default=1000.0)
    add("--slo-token-ms", type=float, default=100.0)
    add("--price-per-hour", type=float, help="of the machine, for the cost per million tokens")
    add("--seed", type=int, default=0)
    add("--json", dest="as_json", action="store_true", help="print one JSON value")
    add("--json-file", type=Path, metavar="FILE")
    add("--html", type=Path, metavar="FILE", help="write a report with curves")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser
