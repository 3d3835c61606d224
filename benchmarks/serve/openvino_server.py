"""OpenVINO GenAI's continuous batching behind /v1/completions, so that `icc bench serve` can measure it.

    python benchmarks/serve/openvino_server.py build/cpu/1b-openvino build/serve/llama-1b/tokenizer.json --port 8002

One thread steps the pipeline, as in OpenVINO Model Server (which no package index has); requests only wait for their
tokens. Answers are streamed, greedy and always `max_tokens` long, which is all that the benchmark needs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as og
from tokenizers import Tokenizer


class Engine:
    """The pipeline and the thread that steps it."""

    def __init__(self, model: str, threads: int, slots: int, cache_gib: int) -> None:
        scheduler = og.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = cache_gib, slots, False
        scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 512, True
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipe = og.ContinuousBatchingPipeline(model, scheduler, "CPU", properties, {})
        self._ids = itertools.count()
        self._new: queue.Queue[tuple[list[int], int, queue.Queue]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, ids: list[int], count: int) -> queue.Queue:
        """Submit a prompt; a queue that receives `count` token ids as they are generated."""
        answer: queue.Queue = queue.Queue()
        self._new.put((ids, count, answer))
        return answer

    def _run(self) -> None:
        live: list[tuple[Any, queue.Queue]] = []
        while True:
            while not live or not self._new.empty():
                ids, count, answer = self._new.get()
                config = og.GenerationConfig()
                config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
                tensor = ov.Tensor(np.array([ids], dtype=np.int64))
                live.append((self._pipe.add_request(next(self._ids), tensor, config), answer))
            self._pipe.step()
            for handle, answer in live:
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            answer.put(int(token))
            live = [(h, q) for h, q in live if h.get_status() == og.GenerationStatus.RUNNING]


def handler(engine: Engine, tokenizer: Tokenizer) -> type[BaseHTTPRequestHandler]:
    """The HTTP request handler for an engine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # the end of the connection ends a body

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

        def _begin(self, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()

        def _event(self, value: Any) -> None:
            self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
            self.wfile.flush()

        def do_GET(self) -> None:
            self._begin("application/json")
            self.wfile.write(json.dumps({"object": "list", "data": [{"id": "openvino", "object": "model"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            ids, count = tokenizer.encode(body["prompt"]).ids, body["max_tokens"]
            answer = engine.ask(ids, count)
            self._begin("text/event-stream")
            for _ in range(count):
                self._event({"choices": [{"index": 0, "text": tokenizer.decode([answer.get()])}]})
            usage = {"prompt_tokens": len(ids), "completion_tokens": count, "total_tokens": len(ids) + count}
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

    return Handler


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokenizer")
    parser.add_argument("--port", type=int, default=8002)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--cache-gib", type=int, default=1)
    a = parser.parse_args()
    engine = Engine(a.model, a.threads, a.slots, a.cache_gib)
    ThreadingHTTPServer(("127.0.0.1", a.port), handler(engine, Tokenizer.from_file(a.tokenizer))).serve_forever()


if __name__ == "__main__":
    main()
