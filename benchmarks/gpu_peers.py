"""The peers of benchmarks/gpu.py: transformers on the same GPU, in bf16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

BATCHES = (1, 8, 32, 128)
PREFILL = 2048
DECODE_CONTEXT = 128
OUTPUT = 128


def seconds(work: Callable[[], Any], rounds: int = 20) -> float:
    """Median seconds of some work on the device."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def static_cache(model: Path) -> list[dict[str, Any]]:
    """Rows of transformers.generate with a static cache, its decode step compiled by torch.compile."""
    peer = _transformers(model)
    rows = []
    for batch in BATCHES:
        ids = torch.randint(3, 1000, (batch, DECODE_CONTEXT), device="cuda")

        def generate(count: int, ids: torch.Tensor = ids) -> None:
            options = {"cache_implementation": "static", "do_sample": False, "eos_token_id": None}
            peer.generate(ids, min_new_tokens=count, max_new_tokens=count, **options)

        for _ in range(2):  # compiles
            generate(OUTPUT)
        long, short = (_wall(partial(generate, count)) for count in (OUTPUT, 1))
        rows.append({"batch": batch, "decode_tok_s": batch * (OUTPUT - 1) / (long - short)})
    ids = torch.randint(3, 1000, (1, PREFILL), device="cuda")
    with torch.no_grad():
        rate = PREFILL / seconds(lambda: peer(input_ids=ids, use_cache=True, logits_to_keep=1), 5)
    return [*rows, {"prefill_tok_s": rate}]


def continuous_batching(model: Path) -> list[dict[str, Any]]:
    """Rows of transformers' continuous batching (generate_batch), with prefill, without set-up."""
    from transformers import GenerationConfig

    peer = _transformers(model)
    rows = []
    for batch in BATCHES:
        prompts = torch.randint(3, 1000, (batch, DECODE_CONTEXT)).tolist()
        options = GenerationConfig(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)
        run = partial(peer.generate_batch, inputs=prompts, generation_config=options, persistent_manager=True)
        try:
            run()  # captures its graphs
            rows.append({"batch": batch, "decode_tok_s": batch * OUTPUT / _wall(run)})
        finally:
            peer.destroy_cached_continuous_batching_manager()
    return rows


PEERS = {"static": static_cache, "batching": continuous_batching}


def _transformers(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.cuda.empty_cache()
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval().to("cuda")


def _wall(work: Callable[[], Any]) -> float:
    """Median wall seconds of three runs."""
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
