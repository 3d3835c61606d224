"""`python fault_server.py ENGINE FAULT [serve options]`: a server whose engine process has a fake device with a fault.

It runs itself as its engine process: `python fault_server.py --worker FD FAULT TOKENIZER`. The fake device counts:
token t is followed by t + 1. A fault occurs in the step that runs the token 77 ("M"). The fault "stages" makes every
stage of a request fail, each at its own word or letter.
"""

from __future__ import annotations

import collections
import functools
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import icc.runtime.tokenizer
import msgspec
import numpy as np
from icc.runtime.batch.scheduled import ScheduledBatch
from icc.runtime.format.manifest import Limits, Manifest, ModelFacts, QuantFacts, SamplingDefaults
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor
from icc.runtime.parent import die_with_parent
from icc.runtime.requests.sampler import SampledToken, Sampler
from icc.runtime.server.api import limits
from icc.runtime.server.engine.channel import Channel
from icc.runtime.server.engine.worker import Worker

TRIGGER = 77
NAN, SAMPLE, SAMPLE_ID, DETOKENIZE = b"PTWZ"  # the tokens at which these stages fail
VOCAB = 258


class FaultyExecutor(FakeExecutor):
    """Counts upwards, `delay` seconds per step, until the trigger runs. Reading a KV slot that was not written since it
    was freed is an assertion, as if freed memory held NaN."""

    def __init__(self, fault: str, delay: float) -> None:
        super().__init__(
            vocab_size=VOCAB,
            num_blocks=256,
            block_size=4,
            max_batch_size=8,
            max_step_tokens=64,
            max_logit_rows=8,
            nan_after=NAN if fault == "stages" else None,
        )
        self.fault, self.delay = fault, delay

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        time.sleep(self.delay)
        if any(TRIGGER in sequence.token_ids for sequence in batch.sequences):
            if self.fault == "exit":
                os._exit(9)
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "busy":
                for _ in range(50):  # works for a fifth of five seconds
                    work = time.thread_time() + 0.02
                    while time.thread_time() < work:
                        pass
                    time.sleep(0.08)
            if self.fault == "stages":
                raise RuntimeError("the device failed, secret 0xdeadbeef at /root/secret")
        self.batches.clear()
        return super().step(batch)


def break_sampler() -> None:
    sample = Sampler.sample

    def faulty(self: Sampler, logits: np.ndarray):
        if int(logits.argmax()) == SAMPLE:
            raise RuntimeError("a fault in sampling")
        return SampledToken(VOCAB + 5) if int(logits.argmax()) == SAMPLE_ID else sample(self, logits)

    Sampler.sample = faulty


def break_detokenizer() -> None:
    push = icc.runtime.tokenizer.Detokenizer.push

    def faulty(self, token_id: int) -> str:
        if token_id == DETOKENIZE:
            raise RuntimeError("a fault in detokenizing")
        return push(self, token_id)

    icc.runtime.tokenizer.Detokenizer.push = faulty


def break_http_stages() -> None:
    """Faults of the HTTP process: a stage fails if the request contains the word "!stage", such as "!parse"."""
    from icc.runtime.server.api import answers, decoding, sandbox
    from icc.runtime.server.http import streams

    def fail_on(owner: Any, name: str, stage: str) -> None:
        real = getattr(owner, name)

        def faulty(*arguments: Any, **options: Any) -> Any:
            if f"!{stage}" in repr(arguments) or f"!{stage}" in repr(vars(arguments[0]) if name == "whole" else ""):
                raise RuntimeError(f"a fault in {stage}, secret 0xdeadbeef at /root/secret")
            return real(*arguments, **options)

        setattr(owner, name, faulty)

    fail_on(decoding, "decode", "parse")
    fail_on(sandbox.Sandbox, "render", "template")
    fail_on(sandbox.Sandbox, "lower", "grammar")
    fail_on(icc.runtime.tokenizer.Tokenizer, "encode", "tokenise")
    fail_on(answers.CompletionAnswer, "whole", "write")
    encode, write = icc.runtime.tokenizer.Tokenizer.encode, streams.Framing.event
    strange = {"!large": VOCAB + 7, "!negative": -3}

    def strange_ids(self: Any, text: str, *arguments: Any, **options: Any) -> list[int]:
        return [strange[text]] if text in strange else encode(self, text, *arguments, **options)

    def faulty_write(self: Any, value: Any) -> bytes:
        if any(text == "\x7f" for text in (getattr(choice, "text", "") for choice in getattr(value, "choices", ()))):
            raise RuntimeError("a fault in writing")
        return write(self, value)

    icc.runtime.tokenizer.Tokenizer.encode = strange_ids
    streams.Framing.event = faulty_write


def manifest() -> Manifest:
    return Manifest(
        1, "0.1.0", "cpu", "cpu",
        ModelFacts("Fake", VOCAB, 1, 1, 1, 512, None, [257], None),
        QuantFacts("none", 32.0, []), Limits(512, 8, 64), SamplingDefaults(), {}, "t", {},
    )  # fmt: skip


def as_on_another_host(folder: Path) -> None:
    """Keep KV in a folder of its own, as on another host, and let a fake NIXL move it if ICC_FAKE_NIXL is set."""
    from icc.runtime.server.engine import kv_gifts, kv_transfer
    from icc.runtime.server.http import prefillers, served

    kv_transfer.KV_FOLDER = folder
    kv_gifts.KVGifts.__init__.__defaults__ = (folder,)
    prefillers.Prefillers.__init__.__defaults__ = ((), folder, None, None, 1 << 20)
    if "ICC_FAKE_NIXL" in os.environ:
        command = [sys.executable, str(Path(__file__).with_name("fake_nixl.py")), "{fd}"]
        served.Nixl = functools.partial(served.Nixl, command)


def move_always(prefills: int) -> None:
    """Let a replica of the second role answer every prompt, and one of the first role compute it. prefills: the number
    of replicas of the first role."""
    from icc.runtime.server.engine import engine_pool
    from icc.runtime.server.engine.step_costs import Candidates, Costs, Placement

    def place(prompt: Candidates, costs: Costs | None, *rest: Any) -> Placement:
        first, others = ([one for one in prompt if (one[0].replica < prefills) == role] for role in (True, False))
        answers, tokens = (others or first)[0]
        if costs is None or not (first and others) or first[0][1] <= costs.unit:
            return Placement(answers.replica, None, tokens)
        return Placement(answers.replica, first[0][0].replica, first[0][1])

    engine_pool.place = place


def worker(fd: int, fault: str, tokenizer_file: str) -> None:
    die_with_parent()
    if fault == "stages":
        break_sampler()
        break_detokenizer()
    with open(tokenizer_file, "rb") as stream:
        tokenizer = icc.runtime.tokenizer.Tokenizer(stream.read())
    delay = 0.02 if fault != "slow" else 0.2
    llm = LLM(manifest(), FaultyExecutor(fault, delay), tokenizer)
    loop = Worker(llm, Channel(socket.socket(fileno=fd)))
    if log := os.environ.get("ICC_WATCH_LOG"):
        watch(log)
    loop.run()


def watch(log: str) -> None:
    """Log to a file the actions that are forbidden while requests are served: RELIABILITY S1 and S10."""
    banned = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "code.")
    network = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")
    known = tuple(dict.fromkeys([sys.prefix, sys.base_prefix, str(Path(icc.__file__).resolve().parent), "<frozen"]))
    stream = open(log, "a", buffering=1)

    def hook(event: str, arguments: tuple) -> None:
        if event in ("exec", "compile") and sys._getframe(1).f_code.co_filename == collections.__file__:
            return  # a named tuple in a module that is imported late
        if event == "exec":  # running the code of an installed file is an import
            name = arguments[0].co_filename
            if not os.path.realpath(name).startswith(known) and not name.startswith(known):
                stream.write(f"exec {name}\n")
        elif event == "compile" and arguments[0] is not None and not str(arguments[1]).startswith(known):
            stream.write(f"compile {arguments[1]}\n")
        elif event.startswith(banned) or event in network:
            stream.write(f"{event} {str(arguments)[:200]}\n")
        elif (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            if arguments[0] not in ("/dev/null", log):
                stream.write(f"write {arguments[0]}\n")

    sys.addaudithook(hook)
    stream.write("watching\n")


def watch_when_ready(log: str) -> None:
    from icc.runtime.server.api.core import Core

    start = Core.start

    async def watched(self: Core) -> None:
        await start(self)
        watch(log)

    Core.start = watched


def main(arguments: list[str]) -> int:
    if folder := os.environ.get("ICC_KV_FOLDER"):
        as_on_another_host(Path(folder))
    if arguments[0] == "--worker":
        worker(int(arguments[1]), arguments[2], arguments[3])
        return 0
    if log := os.environ.get("ICC_WATCH_LOG"):
        watch_when_ready(log)
    from icc.runtime.options import LoadOptions
    from icc.runtime.server.http.serve import ServeOptions, serve

    engine, fault, options = arguments[0], arguments[1], msgspec.json.decode(arguments[2])
    if fault == "stages":
        break_http_stages()
    for name, value in options.pop("limits", {}).items():  # shorter time limits, for faster tests
        assert hasattr(limits, name)
        setattr(limits, name, value)
    if "ICC_MOVE_ALWAYS" in os.environ:
        move_always(options["prefill_replicas"])
    if "api_key_file" in options:
        options["api_key_file"] = Path(options["api_key_file"])
    command = [sys.executable, __file__, "--worker", "{fd}", fault, f"{engine}/tokenizer/tokenizer.json"]
    return serve(ServeOptions(LoadOptions(engine), port=0, command=command, **options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
