"""RELIABILITY R7 over HTTP: a compiled engine gives the same bits for a request alone and among others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import icc
import pytest
import tokenizers
from sizes import SOAK

from .conftest import Served, running, serve_command

ROUNDS = 4 if SOAK else 2
COUNTS = ("engine_steps", "generation_tokens")


@pytest.fixture(scope="module")
def compiled(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a tiny llama whose tokens are words. Its steps are small: prompts are cut, requests wait."""
    folder = tmp_path_factory.mktemp("bits")
    tiny.save_tiny(tiny.tiny_configs()["llama"], folder / "llama")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(120)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "llama" / "tokenizer.json"))
    limits = {"max_step_tokens": 24, "max_batch_size": 6, "max_seq_len": 128}
    engine = icc.compile(folder / "llama", folder / "llama.engine", target="native", quant="rtn4", **limits)
    with running(serve_command(engine), folder / "log", "llama") as server:
        yield server


def answer(server: Served, prompt: list[int], tokens: int) -> str:
    """Texts and log-probabilities of an answer, with all digits; a token's word is its id."""
    found = server.complete(prompt, max_tokens=tokens, temperature=0, logprobs=3, ignore_eos=True)["choices"]
    return json.dumps([(choice["text"], choice["logprobs"]) for choice in found])


def test_the_same_bits_alone_and_among_random_neighbours(compiled: Served) -> None:
    source = random.Random(11)
    shared = [source.randrange(3, 120) for _ in range(40)]
    asked = [
        (shared[: source.choice([0, 17, 33])] + [source.randrange(3, 120) for _ in range(source.randrange(1, 30))],
         source.randrange(4, 30))
        for _ in range(12)
    ]  # fmt: skip
    alone = [answer(compiled, *one) for one in asked]
    assert len(set(alone)) == len(asked)

    def neighbour(seed: int) -> None:
        chance = random.Random(seed)
        prompt = shared[: chance.choice([0, 25])] + [chance.randrange(3, 120) for _ in range(chance.randrange(1, 40))]
        fields = {"max_tokens": chance.randrange(1, 40), "temperature": chance.choice([0, 1.5]), "seed": seed}
        if chance.random() < 0.3:  # disconnects in the middle of the answer
            stream = compiled.stream("w5 w6", **fields)
            stream.event()
            stream.drop(reset=True)
        else:
            compiled.complete(prompt, n=chance.choice([1, 3]), **fields)

    before = [compiled.metric(f"icc:{name}_total") for name in COUNTS]
    with ThreadPoolExecutor(24) as pool:
        for round_number in range(ROUNDS):
            others = [pool.submit(neighbour, 100 * round_number + number) for number in range(30)]
            source.shuffle(order := list(range(len(asked))))
            beside = [(number, pool.submit(answer, compiled, *asked[number])) for number in order]
            for number, found in beside:
                assert found.result() == alone[number], f"request {number} in round {round_number}"
            for other in others:
                other.result()
    steps, tokens = (compiled.metric(f"icc:{name}_total") - old for name, old in zip(COUNTS, before, strict=True))
    assert tokens > 2 * steps, "the requests were meant to run together"
    compiled.wait_until(compiled.idle)
