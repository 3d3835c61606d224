"""Routers in front of two `icc serve`: vllm-router and smg, each with its routing policies."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from servers import MODEL, ROOT, Server, ask, environment, free_ports, icc, process, until, version

Row = tuple[str, str, str, bool]
_CHATS, _TURNS, _ANSWER = 12, 5, 12
_OVER_GRPC = " over gRPC"  # instead of HTTP
# round robin first, then by caches; answers are compared within a group, because smg tokenizes prompts if it uses gRPC
_POLICIES = {
    "vllm-router": (("round_robin", "cache_aware", "kv_aware"),),
    "smg": (("round_robin", "cache_aware"), (f"round_robin{_OVER_GRPC}", f"cache_aware{_OVER_GRPC}")),
}
_ROLES = "one server computes prompts, one answers"
_BLOCK = 32


def _command(name: str, programs: Path, policy: str, port: int, workers: dict[str, int]) -> list[str | Path]:
    """The command of a router over workers. workers: the port of its KV events by a worker's URL."""
    [metrics] = free_ports(1)
    chosen = policy.removesuffix(_OVER_GRPC)
    common = ["--policy", chosen, "--port", str(port), "--prometheus-port", str(metrics), "--worker-urls", *workers]
    common += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "2"]
    if policy == _ROLES:
        first, second = workers
        common = [
            *common[2 : common.index("--worker-urls")],
            *common[common.index("--worker-startup-check-interval") :],
        ]
        common += ["--vllm-pd-disaggregation", "--prefill", first, "--decode", second, "--kv-connector", "nixl"]
        return [programs / "vllm-router", *common]
    if name == "smg":
        return [programs / "smg", "launch", *common, "--backend", "vllm"]
    if policy == "kv_aware":
        common += ["--kv-event-block-size", str(_BLOCK), "--kv-event-model", MODEL]
        for url, events in workers.items():
            common += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{events}"]
    return [programs / "vllm-router", *common]


class _Chats:
    """Conversations that continue with the answers that they get; `lost` has the errors of failed requests."""

    def __init__(self, url: str, turns: int = _TURNS) -> None:
        self.url, self.lost, self.answers = url, list[str](), dict[int, list[str]]()
        self.turns = turns
        self._turns = threading.Semaphore(0)

    def run(self) -> None:
        """Run all conversations, eight at a time."""
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(self._chat, range(_CHATS)))

    def wait(self, turns: int) -> None:
        """Wait until `turns` more turns are done, at most 120 s for each."""
        for _ in range(turns):
            self._turns.acquire(timeout=120)

    def _chat(self, number: int) -> None:
        source = random.Random(number)
        said = "".join(f"name_{source.randrange(1000)} = {source.randrange(1000)}\n" for _ in range(14))
        self.answers[number] = []
        for _ in range(self.turns):
            said += "".join(f"name_{source.randrange(1000)} += {source.randrange(9)}\n" for _ in range(5))
            body = {"model": MODEL, "prompt": said, "max_tokens": _ANSWER, "temperature": 0, "ignore_eos": True}
            try:
                text = ask(f"{self.url}/v1/completions", body)["choices"][0]["text"]
            except (OSError, RuntimeError) as error:
                self.lost.append(str(error))
                text = ""
            self.answers[number].append(text)
            said += text
            self._turns.release()


def _hit_rate(servers: list[Server]) -> float:
    hits, queries = (
        sum(server.metric(f"icc:prefix_cache_{kind}_total") for server in servers) for kind in ("hits", "queries")
    )
    return hits / queries


def judge(name: str, engine: Path) -> Iterator[Row]:
    """Yield a row per policy, each on new servers, then one for the last policy while an engine is killed; for
    vllm-router also one with separate servers for prompts and answers."""
    programs = environment(name.replace("-", "_"), name)
    shown = f"{name} {version(programs, name)}"
    expected: dict[int, list[str]] = {}
    for policies in _POLICIES[name]:
        expected = yield from _judge_policies(name, shown, programs, policies, engine)

    if name == "vllm-router":
        with _routed(name, programs, _ROLES, engine) as (url, servers):
            before = [server.metric("icc:prefix_cache_hits_total") for server in servers]
            chats = _Chats(url, turns=1)
            chats.run()
            found = servers[1].metric("icc:prefix_cache_hits_total") - before[1]
            share = found / servers[1].metric("icc:prefix_cache_queries_total")
            same = sum(chats.answers[number] == texts[:1] for number, texts in expected.items())
            figures = (
                f"{share:.2f} of the prompt tokens of the second came from the first, {len(chats.lost)} of {_CHATS}"
            )
            figures += f" requests lost, {same} of {_CHATS} answers as before"
            yield shown, _ROLES, figures, not chats.lost and same == _CHATS and share > 0.7


def _judge_policies(
    name: str, shown: str, programs: Path, policies: tuple[str, ...], engine: Path
) -> Generator[Row, None, dict[int, list[str]]]:
    """Yield the rows of policies, of which the first is round robin; returns the answers that all must give."""
    turns = 0.0
    expected: dict[int, list[str]] = {}
    for policy in policies:
        with _routed(name, programs, policy, engine) as (url, servers):
            chats, start = _Chats(url), time.monotonic()
            chats.run()
            seconds, rate = time.monotonic() - start, _hit_rate(servers)
            turns, expected = turns or rate, expected or chats.answers
            shares = sorted(server.metric("icc:prompt_tokens_total") for server in servers)
            figures = f"{rate:.2f} of prompt tokens out of the caches, {len(chats.lost)} of {_CHATS * _TURNS}"
            figures += f" requests lost, the busier server had {shares[1] / sum(shares):.2f}, {seconds:.0f} s"
            better = policy == policies[0] or rate > turns
            yield shown, policy, figures, not chats.lost and better and chats.answers == expected
    policy = policies[-1]
    with _routed(name, programs, policy, engine) as (url, servers):
        chats = _Chats(url)
        running = threading.Thread(target=chats.run)
        running.start()
        chats.wait(_CHATS * _TURNS // 3)
        servers[0].kill_engine()
        running.join()
        same = sum(chats.answers[number] == texts for number, texts in expected.items())
        figures = f"{len(chats.lost)} of {_CHATS * _TURNS} requests lost, {same} of {_CHATS} chats as before"
        yield shown, f"{policy}, an engine is killed", figures, not chats.lost and same == _CHATS
    return expected


@contextlib.contextmanager
def _routed(name: str, programs: Path, policy: str, engine: Path) -> Iterator[tuple[str, list[Server]]]:
    """The address of a router in front of two servers, and the servers, until the end of the block."""
    with contextlib.ExitStack() as stack:
        ports = free_ports(7)
        servers: list[Server] = []
        workers: dict[str, int] = {}
        for number in range(2):
            port, events, replay = ports[3 * number : 3 * number + 3]
            options = ["--kv-events", f"tcp://127.0.0.1:{events}", "--kv-events-replay", f"tcp://127.0.0.1:{replay}"]
            if policy.endswith(_OVER_GRPC):
                options = ["--grpc-port", str(events)]
            servers.append(stack.enter_context(icc(engine, f"routed{number}", port, *options)))
            address = f"grpc://127.0.0.1:{events}" if policy.endswith(_OVER_GRPC) else servers[-1].url
            workers[address] = events
        log = ROOT / "build" / "routers" / f"{name}.log"
        stack.enter_context(process(_command(name, programs, policy, ports[6], workers), log))
        url = f"http://127.0.0.1:{ports[6]}"
        until(lambda: ask(f"{url}/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 1}), 180)
        yield url, servers
