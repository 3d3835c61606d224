"""The first script to run on a GPU: do kernels compute there what they compute interpreted? It measures no speed.

    python benchmarks/gpu_check.py --target h200 --out results/gpu-check

Compiles the sample checkpoint (a few million parameters, about a minute) and runs separate checks on the GPU:

logits: of a prompt, against transformers in float32 on the CPU (bf16 weights; interpreted: 0.6 %), and 4-bit against
icc's CPU engine, whose products round their inputs to 8 bits (interpreted: 2.1 %). cache: greedy tokens alone, again
from the prefix cache, and in batches of 2 to 16. spec: greedy tokens with every drafter against plain decoding. bits: a
`--deterministic` engine gives bit-identical tokens and logprobs alone, in batches, and from the prefix cache. seeds: a
sampled completion is the same alone and in a batch. memory: all GPU memory is released. wide: one layer with an 8B's
widths gives the same bits in twenty runs of 400 tokens, and the CPU's logits: products with many steps, in which matrix
units still run while the next step begins, were sometimes wrong when narrow products were right.

Greedy tokens may differ after near ties, because the kernels of two batch sizes round differently: a check reports the
share of tokens before the first difference, and fails at 90 % or less. Writes OUT.json after every check; the status is
the number of failed checks.
Under compute-sanitizer: `compute-sanitizer --tool memcheck python benchmarks/gpu_check.py ...` (or racecheck).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import icc
import make_model
import numpy as np

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
LIMITS = {"max_seq_len": 512, "max_batch_size": 16, "max_step_tokens": 128}
TEXTS = (
    "def fib(n):\n    ", "import os\n\n\ndef read(path):\n", "class Stack:\n    def __init__(self):\n        self.",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(", "x", "# The quick brown fox\n" * 12,
    "def add(a, b):\n    return a + b\n\n\ndef add(a, b, c):\n    return a", "try:\n    pass\nexcept ",
)  # fmt: skip
GREEDY = icc.SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
WARM = icc.SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=11, logprobs=3, ignore_eos=True)
Found = tuple[bool, dict[str, Any]]


class Engines:
    """Engines of the sample checkpoint, and of one layer of an 8B, compiled when first asked for."""

    def __init__(self, target: str, work: Path) -> None:
        self._target, self._work = target, work

    def path(self, name: str, target: str = "", **options: Any) -> Path:
        """The path of an engine of the sample checkpoint; `options` are those of its compile."""
        path = self._work / f"{target or self._target}-{name}.engine"
        if not (path / "engine.json").is_file():
            icc.compile(SAMPLES / "pystd", path, target=target or self._target, **LIMITS, **options)
        return path

    def wide(self, quant: str, target: str = "") -> Path:
        """The path of the engine of one layer."""
        model, path = self._work / "wide", self._work / f"{target or self._target}-wide-{quant}.engine"
        if not (model / "model.safetensors").is_file():
            make_model.SHAPES["wide"] = (4096, 1, 32, 8, 14336, 4096, True)
            make_model.write("wide", model)
        if not (path / "engine.json").is_file():
            icc.compile(model, path, target=target or self._target, quant=quant, **LIMITS | {"max_step_tokens": 512})
        return path

    def load(self, name: str, drafter: str = "none", **options: Any) -> icc.LLM:
        """Load the engine `name`."""
        return icc.load(self.path(name, **options), spec=drafter)


def checks(engines: Engines) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Yield (name, check) of all checks."""
    for name, options in (("none", {}), ("rtn4", {"quant": "rtn4"}), ("kv8", {"quant": "rtn4", "kv_cache": "int8"})):
        yield f"logits {name}", partial(check_logits, engines, name, options)
        yield f"cache {name}", partial(check_cache, engines, name, options)
    for spec in ("medusa", "layer-skip", "ngram", "draft"):
        yield f"spec {spec}", partial(check_speculation, engines, spec)
    for name, options in (("none", {}), ("rtn4", {"quant": "rtn4"})):
        yield f"bits {name}", partial(check_bits, engines, f"{name}-deterministic", {**options, "deterministic": True})
    for quant in ("rtn4", "int8"):
        yield f"wide {quant}", partial(check_wide, engines, quant)
    yield "seeds", partial(check_seeds, engines)
    yield "memory", partial(check_memory, engines)


def check_logits(engines: Engines, name: str, options: dict[str, Any]) -> Found:
    """Logits against a float32 model or, if quantized, against icc's CPU engine with the same weights."""
    with engines.load(name, **options) as llm:
        ids = llm.encode("".join(TEXTS))[:200]
        found = llm.logits(ids)
    if options:
        with icc.load(engines.path(name, "native", **options)) as llm:
            expected = llm.logits(ids)
    else:
        expected = transformers_logits(ids)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    same = float((found.argmax(1) == expected.argmax(1)).mean())
    return error < (0.08 if options else 0.03) and same > 0.9, {"largest_relative_error": error, "same_argmax": same}


def check_wide(engines: Engines, quant: str) -> Found:
    """Repeated steps of 400 rows give the same bits, and the logits of the CPU engine with the same weights."""
    ids = np.random.default_rng(0).integers(3, 4000, 400).tolist()
    with icc.load(engines.wide(quant)) as llm:
        runs = [llm.logits(ids) for _ in range(20)]
    with icc.load(engines.wide(quant, "native")) as llm:
        expected = llm.logits(ids)
    other = sum(not np.array_equal(run, runs[0]) for run in runs)
    error = max(float(np.abs(run - expected).max() / np.abs(expected).max()) for run in runs)
    return error < 0.08 and not other, {"largest_relative_error": error, "runs_with_other_bits": other}


def transformers_logits(ids: Sequence[int]) -> np.ndarray:
    """float32 `[T, vocab]` of the checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(SAMPLES / "pystd", dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()


def check_cache(engines: Engines, name: str, options: dict[str, Any]) -> Found:
    """Greedy tokens alone, in batches (the CUDA graphs of several sizes), and from the prefix cache."""
    with engines.load(name, **options) as llm:
        alone = [llm.generate([text], GREEDY)[0].token_ids for text in TEXTS]
        shares = {"again": share(llm.generate(list(TEXTS), GREEDY), alone)}
        for batch in (2, 3, 5, 8):
            found = [c for at in range(0, 8, batch) for c in llm.generate(list(TEXTS[at : at + batch]), GREEDY)]
            shares[f"batch {batch}"] = share(found, alone)
        shares["batch 16"] = share(llm.generate([*TEXTS, *TEXTS], GREEDY), [*alone, *alone])
    return min(shares.values()) > 0.9 and len(set(alone[0])) > 1, shares


def share(found: Sequence[icc.Completion], expected: Sequence[Sequence[int]]) -> float:
    """The share of tokens before the first difference of each completion."""
    right = total = 0
    for one, wanted in zip(found, expected, strict=True):
        agree = np.array(one.token_ids) == np.array(wanted)
        right += len(agree) if agree.all() else int(agree.argmin())
        total += len(agree)
    return right / total


def check_speculation(engines: Engines, spec: str) -> Found:
    """Tokens are those of plain decoding, and some guesses are accepted."""
    heads = {"quant": "rtn4", "spec": f"medusa:{SAMPLES / 'pystd-medusa'}"}
    named = {"medusa": ("medusa", heads), "layer-skip": ("skip", {"quant": "rtn4", "spec": "layer-skip:2"})}
    name, options = named.get(spec, ("rtn4", {"quant": "rtn4"}))
    chosen = f"draft:{engines.path('rtn4', quant='rtn4')}" if spec == "draft" else spec
    with engines.load(name, **options) as llm:
        plain = [one.token_ids for one in llm.generate(list(TEXTS), GREEDY)]
    with engines.load(name, chosen, **options) as llm:
        speculator: Any = llm.loop.speculator
        speculator.adaptive = False
        found = llm.generate(list(TEXTS), GREEDY)
        counts = speculator.counts
    facts = {"equal": share(found, plain), "tokens_per_step": counts.tokens_per_step, "accepted": counts.accepted}
    return facts["equal"] > 0.9 and counts.accepted > 0, facts


def check_bits(engines: Engines, name: str, options: dict[str, Any]) -> Found:
    """Tokens and logprobs have the same bits alone, in batches of several sizes, and from cached prefixes."""
    with engines.load(name, **options) as llm:
        alone = [_bits(llm.generate([text], WARM)[0]) for text in TEXTS]
        wrong: dict[str, int] = {}
        for batch in (1, 2, 3, 5, 8):
            found = [c for at in range(0, 8, batch) for c in llm.generate(list(TEXTS[at : at + batch]), WARM)]
            wrong[f"batch {batch}"] = sum(_bits(one) != other for one, other in zip(found, alone, strict=True))
        both = llm.generate([*TEXTS, *TEXTS], WARM)
        wrong["batch 16"] = sum(_bits(one) != other for one, other in zip(both, [*alone, *alone], strict=True))
    return not any(wrong.values()) and len(set(alone[0][0])) > 1, wrong


def _bits(one: icc.Completion) -> tuple[Any, Any]:
    return one.token_ids, one.logprobs


def check_seeds(engines: Engines) -> Found:
    """A seeded completion does not depend on the sampling parameters of others in the batch."""
    with engines.load("rtn4", quant="rtn4") as llm:
        alone = llm.generate([TEXTS[0]], WARM)
        other = icc.SamplingParams(max_tokens=32, temperature=1.3, top_k=7, min_p=0.01, seed=5, ignore_eos=True)
        beside = llm.generate([TEXTS[0], TEXTS[1]], [WARM, other])
        facts = {"equal": share(beside[:1], [alone[0].token_ids]), "different": len(set(beside[1].token_ids))}
    return facts["equal"] > 0.9 and facts["different"] > 1, facts


def check_memory(engines: Engines) -> Found:
    """Free GPU memory after ten loads is that after two, up to 16 MiB."""
    from icc.runtime.executor.cuda.driver import Cuda

    free = []
    for _ in range(10):
        with engines.load("rtn4", quant="rtn4") as llm:
            llm.generate([TEXTS[0]], GREEDY)
        cuda = Cuda()
        free.append(cuda.facts().free_bytes)
        cuda.close()
    lost = free[1] - free[-1]
    return lost < 16 << 20, {"lost_bytes": lost}


def main() -> int:
    """Run all checks; the number that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--work", type=Path, default=Path("build/gpu-check"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="checks whose name begins with this")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name, check in checks(Engines(a.target, a.work)):
        if not name.startswith(a.only):
            continue
        start = time.perf_counter()
        try:
            passed, facts = check()
        except Exception as error:  # continue: other checks may show the reason
            traceback.print_exc()
            passed, facts = False, {"error": f"{type(error).__name__}: {error}"[:500]}
        rows.append({"check": name, "passed": passed, "seconds": round(time.perf_counter() - start, 1), **facts})
        print(json.dumps(rows[-1]), flush=True)
        a.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    failed = sum(not row["passed"] for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} checks passed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
