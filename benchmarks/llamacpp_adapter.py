"""llama.cpp with one adapter, in a process with its own environment, driven by adapters_llamacpp.py over pipes.

    python benchmarks/llamacpp_adapter.py BASE.gguf ADAPTER.gguf THREADS MAX_BATCH

A request is one JSON line: {"prompt", "adapted"} is answered with the logits after the prompt, {"batch", "steps",
"adapted"} with the milliseconds of each step in which `batch` sequences decode together, after four tokens each.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import llama_cpp as lc

LENGTH = 256  # maximum number of tokens of a sequence
clock = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter
SETTLING = 4  # leading steps that are left out, as in adapter_cost.py


class Context:
    """A model in memory, with an adapter that is on or off."""

    def __init__(self, base: str, adapter: str, threads: int, batch: int) -> None:
        self._quiet = lc.llama_log_callback(lambda level, text, data: None)  # llama.cpp holds its address
        lc.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lc.llama_backend_init()
        self._model: Any = lc.llama_model_load_from_file(base.encode(), lc.llama_model_default_params())
        options = lc.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.n_batch, options.n_ubatch = batch * LENGTH, batch, 512, 512
        options.n_threads = options.n_threads_batch = threads
        if "F32" in base:
            options.type_k = options.type_v = lc.GGML_TYPE_F32
            options.flash_attn_type = lc.LLAMA_FLASH_ATTN_TYPE_DISABLED  # flash attention computes in float16
        self._context: Any = lc.llama_init_from_model(self._model, options)
        self._adapter: Any = lc.llama_adapter_lora_init(self._model, adapter.encode())
        if not self._adapter:
            raise RuntimeError(f"llama.cpp does not take {adapter}")
        self._batch = lc.llama_batch_init(512, 0, batch)
        self._vocabulary = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self._model))

    def begin(self, adapted: bool) -> None:
        """Forget all sequences, and turn the adapter on or off. RuntimeError if llama.cpp fails."""
        lc.llama_memory_clear(lc.llama_get_memory(self._context), False)
        adapters = (lc.llama_adapter_lora_p_ctypes * 1)(self._adapter)
        scales = (ctypes.c_float * 1)(1.0)
        if lc.llama_set_adapters_lora(self._context, adapters, int(adapted), scales):
            raise RuntimeError("llama_set_adapters_lora failed")

    def decode(self, items: list[tuple[int, int, int, bool]]) -> None:
        """Run one step. items: (token, position, sequence, whether logits are wanted). RuntimeError if it fails."""
        self._batch.n_tokens = len(items)
        for i, (token, position, sequence, wanted) in enumerate(items):
            self._batch.token[i], self._batch.pos[i], self._batch.n_seq_id[i] = token, position, 1
            self._batch.seq_id[i][0], self._batch.logits[i] = sequence, wanted
        if lc.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")
        lc.llama_synchronize(self._context)

    def logits(self, prompt: list[int]) -> list[float]:
        """The logits after a prompt, one per word of the vocabulary."""
        last = len(prompt) - 1
        self.decode([(token, at, 0, at == last) for at, token in enumerate(prompt)])
        return lc.llama_get_logits_ith(self._context, last)[: self._vocabulary]

    def steps(self, batch: int, count: int) -> list[float]:
        """Milliseconds of each step of `batch` sequences, without the first SETTLING of `count`."""
        for sequence in range(batch):
            self.decode([(5 + sequence + at, at, sequence, at == 3) for at in range(4)])
        times: list[float] = []
        for step in range(count):
            start = clock()
            self.decode([(17 + step, 4 + step, sequence, True) for sequence in range(batch)])
            times.append((clock() - start) * 1e3)
        return times[SETTLING:]


def main(base: str, adapter: str, threads: str, batch: str) -> None:
    """Answer requests until the input ends."""
    context = Context(base, adapter, int(threads), int(batch))
    for line in sys.stdin:
        request = json.loads(line)
        context.begin(request["adapted"])
        if "prompt" in request:
            found = context.logits(request["prompt"])
        else:
            found = context.steps(request["batch"], request["steps"])
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
