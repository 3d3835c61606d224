"""Dynamo's KV indexer (`python -m dynamo.indexer` of ai-dynamo-runtime), fed by the events of `icc serve`."""

from __future__ import annotations

import contextlib
import random
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servers import MODEL, ROOT, Server, ask, environment, free_ports, icc, process, until, version

Row = tuple[str, str, str, bool]
_PROMPTS = 24
_SETTLE_S = 0.5  # until published events are indexed


class Indexer:
    """A running indexer that follows one server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def register(self, events: int, replay: int, block_size: int) -> None:
        """Let the indexer follow the events at a port, with replays at another; returns when it does."""
        body = {"instance_id": 1, "endpoint": f"tcp://127.0.0.1:{events}", "model_name": MODEL}
        body |= {"block_size": block_size, "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
        ask(f"{self.url}/register", body)
        until(lambda: '"active"' in str(ask(f"{self.url}/workers")).replace("'", '"'))
        time.sleep(_SETTLE_S)

    def cached(self, tokens: list[int]) -> int:
        """How many of a prompt's tokens the server has cached, according to the indexer."""
        found = ask(f"{self.url}/query", {"model_name": MODEL, "token_ids": tokens})
        return found["scores"].get("1", {}).get("0", 0)


@contextlib.contextmanager
def _indexer(programs: Path) -> Iterator[Indexer]:
    [port] = free_ports(1)
    log = ROOT / "build" / "routers" / "dynamo.log"
    with process([programs / "python", "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"], log):
        url = f"http://127.0.0.1:{port}"
        until(lambda: ask(f"{url}/workers") is not None)
        yield Indexer(url)


def _complete(server: Server, prompt: str) -> int:
    """Complete a prompt; how many of its tokens the server found in its cache."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    usage = ask(f"{server.url}/v1/completions", body)["usage"]
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _tokens(server: Server, prompt: str) -> list[int]:
    return ask(f"{server.url}/v1/completions/render", {"model": MODEL, "prompt": prompt})[0]["token_ids"]


def _compared(server: Server, indexer: Indexer, prompts: list[str], size: int) -> tuple[str, bool]:
    """Compare the indexer's count for each prompt with the server's; the figures, and whether all agree."""
    right = some = told = 0
    for prompt in prompts:
        tokens = _tokens(server, prompt)
        time.sleep(0.05)
        expected = indexer.cached(tokens)
        found = _complete(server, prompt)
        most = (len(tokens) - 1) // size * size  # the last token is always computed
        right += found == min(expected, most)
        some += found > 0
        told += expected
        time.sleep(_SETTLE_S / 5)
    figures = f"{right} of {len(prompts)} prompts as the server found them, {some} of them cached, {told} tokens"
    return figures, right == len(prompts)


def judge(engine: Path) -> Iterator[Row]:
    """Yield a row for each scenario (eviction, restarts): whether the indexer agrees with the server."""
    programs = environment("dynamo", "ai-dynamo-runtime")
    name = f"dynamo.indexer {version(programs, 'ai-dynamo-runtime')}"
    http, events, replay = free_ports(3)
    published = ["--kv-events", f"tcp://127.0.0.1:{events}", "--kv-events-replay", f"tcp://127.0.0.1:{replay}"]
    options = [*published, "--kv-mib", "6"]
    source = random.Random(7)
    prompts = [" ".join(f"value_{source.randrange(1000)} = {n}" for n in range(40)) for _ in range(_PROMPTS)]
    with _indexer(programs) as indexer:
        with icc(engine, "indexed", http, *options) as server:
            size = _block_size(server)
            indexer.register(events, replay, size)
            for prompt in prompts[:4]:
                _complete(server, prompt)
            time.sleep(_SETTLE_S)
            figures, right = _compared(server, indexer, prompts[:4], size)
            yield name, "what was asked before", figures, right and "4 of them cached" in figures
            for prompt in prompts:
                _complete(server, prompt)
            time.sleep(_SETTLE_S)
            figures, right = _compared(server, indexer, prompts[::-1], size)
            some = f"{_PROMPTS} of them cached" not in figures and ", 0 of them" not in figures
            yield name, f"{_PROMPTS} prompts, more than the cache holds", figures, right and some
            server.kill_engine()
            until(lambda: server.metric("icc:engine_restarts_total") == server.metric("icc:engine_ready") == 1)
            time.sleep(_SETTLE_S)
            left = sum(indexer.cached(_tokens(server, prompt)) for prompt in prompts)
            yield name, "the engine process was killed", f"{left} tokens are said to be cached", left == 0
            yield name, "the engine process is a new one", *_twice(server, indexer, prompts[:4], size)
            with _indexer(programs) as second:
                second.register(events, replay, size)
                _complete(server, prompts[5])  # the first batch of events that it sees shows that it has missed some
                time.sleep(_SETTLE_S)
                figures, right = _compared(server, second, prompts[:4], size)
                yield name, "the indexer was started again", figures, right and "4 of them cached" in figures
        with icc(engine, "indexed", http, *options) as server:
            time.sleep(_SETTLE_S)
            left = sum(indexer.cached(_tokens(server, prompt)) for prompt in prompts)
            yield name, "the server was started again", f"{left} tokens are said to be cached", left == 0
            yield name, "the server is a new one", *_twice(server, indexer, prompts[:4], size)


def _twice(server: Server, indexer: Indexer, prompts: list[str], size: int) -> tuple[str, bool]:
    for prompt in prompts:
        _complete(server, prompt)
    time.sleep(_SETTLE_S)
    figures, right = _compared(server, indexer, prompts, size)
    return figures, right and f"{len(prompts)} of them cached" in figures


def _block_size(server: Server) -> int:
    """The block size of a server, read from its metrics as routers do."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        found: Any = re.search(r'^vllm:cache_config_info\{.*block_size="(\d+)"', answer.read().decode(), re.MULTILINE)
    return int(found[1])
