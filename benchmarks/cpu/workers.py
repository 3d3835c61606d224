"""One engine in its own process, driven by bench.py over stdin and stdout, so that it may have its own environment.

    python benchmarks/cpu/workers.py KIND MODEL THREADS MAX_BATCH MAX_LENGTH    (KIND: see WORKERS)

A request is one JSON line {"batch", "context", "tokens", "steps", "seed"}: prefill `context` tokens in each of `batch`
sequences (they may share steps), then `steps` decode steps of one token each. The answer is one JSON line with the
seconds of the prefill and of each decode step: wall time, or the whole process's CPU time if BENCH_CLOCK=cpu is set
(meaningful on a shared machine with one thread). An error is {"error": text}.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial

Answer = tuple[float, list[float]]
Run = Callable[[int, int, int, str], Answer]  # (batch, context, steps, seed)
clock = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter


def prompts(batch: int, context: int, seed: str, below: int = 5000) -> list[list[int]]:
    """`batch` lists of `context` random token ids from 10 to `below`; lists of different seeds share no prefix."""
    source = random.Random(seed)
    return [[source.randrange(10, below) for _ in range(context)] for _ in range(batch)]


def llama(model: str, threads: int, max_batch: int, max_length: int) -> Run:
    """llama.cpp: every sequence in one llama_batch, one llama_decode per step, flash attention, 8-bit or f16 KV."""
    import ctypes

    import llama_cpp as lc

    path, _, kv = model.partition(":")
    quiet = lc.llama_log_callback(lambda level, text, data: None)  # stays referenced: llama.cpp holds its address
    lc.llama_log_set(quiet, ctypes.c_void_p(0))
    lc.llama_backend_init()
    loaded = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
    options = lc.llama_context_default_params()
    options.n_ctx, options.n_seq_max = max_batch * (max_length + 8), max_batch
    options.n_batch = options.n_ubatch = 512
    options.n_threads = options.n_threads_batch = threads
    if kv == "q8":
        options.type_k = options.type_v = lc.GGML_TYPE_Q8_0
    context_ = lc.llama_init_from_model(loaded, options)
    batch_ = lc.llama_batch_init(512, 0, max_batch)

    def decode(items: list[tuple[int, int, int, bool]]) -> None:  # (token, position, sequence, wanted)
        batch_.n_tokens = len(items)
        for i, (token, position, sequence, wanted) in enumerate(items):
            batch_.token[i], batch_.pos[i], batch_.n_seq_id[i] = token, position, 1
            batch_.seq_id[i][0], batch_.logits[i] = sequence, wanted
        if lc.llama_decode(context_, batch_):
            raise RuntimeError("llama_decode failed")
        lc.llama_synchronize(context_)

    def run(batch: int, context: int, steps: int, seed: str) -> Answer:
        assert quiet
        lc.llama_memory_clear(lc.llama_get_memory(context_), False)
        start = clock()
        for sequence, ids in enumerate(prompts(batch, context, seed)):
            for at in range(0, context, 512):
                part = ids[at : at + 512]
                decode([(t, at + i, sequence, at + i == context - 1) for i, t in enumerate(part)])
        prefill, times = clock() - start, []
        for step in range(steps):
            start = clock()
            decode([(17 + step, context + step, sequence, True) for sequence in range(batch)])
            times.append(clock() - start)
        return prefill, times

    return run


def openvino(model: str, threads: int, max_batch: int, max_length: int) -> Run:
    """OpenVINO GenAI's continuous batching: add_request, then step."""
    import numpy as np
    import openvino as ov
    import openvino_genai as og

    scheduler = og.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, max_batch, False
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 512, True
    properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    pipe = og.ContinuousBatchingPipeline(model, scheduler, "CPU", properties, {})
    next_id = 0

    def run(batch: int, context: int, steps: int, seed: str) -> Answer:
        nonlocal next_id
        config = og.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = steps + 1, True, False
        handles = []
        for ids in prompts(batch, context, seed):
            handles.append(pipe.add_request(next_id, ov.Tensor(np.array([ids], dtype=np.int64)), config))
            next_id += 1
        counts = [0] * batch
        start, prefill, times = clock(), 0.0, []
        while pipe.has_non_finished_requests():
            before = clock()
            pipe.step()
            now = clock()
            full = min(counts) > 0
            for i, handle in enumerate(handles):
                while handle.can_read():
                    handle.read()
                    counts[i] += 1
            if full:
                times.append(now - before)
            elif min(counts) > 0:
                prefill = now - start
        return prefill, times[:steps]

    return run


def openvino_sdpa(model: str, threads: int, max_batch: int, max_length: int) -> Run:
    """OpenVINO GenAI's stateful pipeline, one sequence."""
    import numpy as np
    import openvino as ov
    import openvino_genai as og

    pipe = og.LLMPipeline(model, "CPU", ATTENTION_BACKEND="SDPA", INFERENCE_NUM_THREADS=threads)

    def run(batch: int, context: int, steps: int, seed: str) -> Answer:
        if batch != 1:
            raise RuntimeError("one sequence only")
        config = og.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = steps + 1, True, False
        ids = ov.Tensor(np.array(prompts(1, context, seed), dtype=np.int64))
        start = clock()
        found = pipe.generate(og.TokenizedInputs(ids, ov.Tensor(np.ones((1, context), np.int64))), config)
        total = clock() - start
        metrics = found.perf_metrics
        first = metrics.get_ttft().mean / 1e3
        return first, [(total - first) / max(steps, 1)] * steps

    return run


def onnxruntime(model: str, threads: int, max_batch: int, max_length: int) -> Run:
    """ONNX Runtime GenAI."""
    import onnxruntime_genai as og

    config = og.Config(model)
    loaded = og.Model(config)

    def run(batch: int, context: int, steps: int, seed: str) -> Answer:
        params = og.GeneratorParams(loaded)
        params.set_search_options(max_length=context + steps + 2, batch_size=batch, min_length=context + steps + 2)
        generator = og.Generator(loaded, params)
        start = clock()
        generator.append_tokens(prompts(batch, context, seed) if batch > 1 else prompts(1, context, seed)[0])
        generator.generate_next_token()
        prefill, times = clock() - start, []
        for _ in range(steps):
            start = clock()
            generator.generate_next_token()
            times.append(clock() - start)
        return prefill, times

    return run


def icc_(model: str, threads: int, max_batch: int, max_length: int, whole: bool = False) -> Run:
    """icc, through its engine loop: times include scheduling and greedy sampling.

    whole: compute all logits, as requests without greedy decoding need; a minimum number of tokens has that effect.
    """
    import icc

    llm = icc.load(model, threads=threads, verify=False)
    loop, below = llm.loop, min(5000, llm.manifest.model.vocab_size)

    def run(batch: int, context: int, steps: int, seed: str) -> Answer:
        params = icc.SamplingParams(
            max_tokens=steps + 1, min_tokens=int(whole), temperature=0.0, repetition_penalty=1.0, ignore_eos=True
        )
        start = clock()
        generations = [g for ids in prompts(batch, context, seed, below) for g in loop.add(ids, params)]
        while any(g.first_token is None for g in generations):
            loop.step()
        prefill, times = clock() - start, []
        while any(g.finish_reason is None for g in generations):
            start = clock()
            loop.step()
            times.append(clock() - start)
        return prefill, times[:steps]

    return run


WORKERS: dict[str, Callable[[str, int, int, int], Run]] = {
    "llama": llama, "openvino": openvino, "openvino-sdpa": openvino_sdpa, "onnxruntime": onnxruntime, "icc": icc_,
    "icc-whole": partial(icc_, whole=True),
}  # fmt: skip


def main() -> None:
    """Answer requests until stdin ends."""
    kind, model, *numbers = sys.argv[1:]
    run = WORKERS[kind](model, *map(int, numbers))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            prefill, steps = run(request["batch"], request["context"], request["steps"], request["seed"])
            answer = {"prefill": prefill, "steps": steps}
        except Exception as error:  # the parent decides how to treat a failing peer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
