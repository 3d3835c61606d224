"""What --kv-policy loses: perplexity after a long context and far beyond a window, and needles found, per policy.

`python benchmarks/eviction.py MODEL --text FILE_OR_FOLDER --engines FOLDER` compiles what FOLDER lacks and prints rows.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import icc
import numpy as np
from icc.runtime.batch.scheduled import StepOutcome, Verdict
from icc.runtime.llm import LLM
from icc.runtime.scheduler.request import RequestSpec

CONTEXT = 1024  # tokens, of which policies keep a half or a quarter
SCORED = 256  # tokens at the end of a context that are scored; those before are the prompt
LONG = 8  # length of the text that streaming reads, in windows of 512 tokens
POLICIES = (
    "all", "streaming:sinks=4,window=508", "streaming:sinks=4,window=252", "h2o:budget=512,recent=128",
    "h2o:budget=256,recent=64", "snapkv:budget=512,recent=32", "snapkv:budget=256,recent=32",
)  # fmt: skip
QUESTIONS = {
    "needles, as it stood": "\n\nThe secret number is",
    "needles, asked": "\n\nBefore this goes on: what was the number that had to be remembered?\nThe secret number is",
}


def engine(model: Path, folder: Path, policy: str) -> Path:
    """The engine of a policy, compiled if it is missing."""
    path = folder / f"{policy.replace(':', '-').replace(',', '-')}.engine"
    if not path.exists():
        icc.compile(model, path, target="native", kv_policy=policy, max_seq_len=LONG * 512, max_batch_size=2)
    return path


def scored(llm: LLM, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The negative log-likelihood (nats, summed) of `answer` after a prompt."""
    scheduler, rows = llm.loop.scheduler, []
    scheduler.add(RequestSpec(1 << 40, tuple(prompt), len(answer) + 1, all_logits=True, use_cache=False), answer)
    while scheduler.has_work():
        batch = scheduler.schedule()
        [sequence] = batch.sequences
        logits = llm.executor.step(batch).astype(np.float64)
        wanted = [*prompt, *answer, 0][sequence.start + 1 : sequence.end + 1]
        peak = logits.max(axis=1)
        total = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
        rows += (total - logits[np.arange(len(wanted)), wanted]).tolist()
        scheduler.update([StepOutcome(sequence.request_id, 0, Verdict.STOP)])
    return float(np.sum(rows[len(prompt) - 1 : -1]))


def needles(llm: LLM, filler: Sequence[int], depths: Sequence[float], question: str) -> int:
    """How many hidden numbers, one prompt per depth (0 to 1), the engine repeats when `question` asks for them."""
    assert llm.tokenizer is not None
    source, found = random.Random(0), 0
    for depth in depths:
        number = str(source.randrange(10_000, 99_999))
        needle = llm.tokenizer.encode(f"\n\nThe secret number is {number}. Remember it.\n\n", add_special_tokens=False)
        asked = llm.tokenizer.encode(question, add_special_tokens=False)
        room = CONTEXT - 16 - len(needle) - len(asked)
        at = int(depth * room)
        prompt = [*filler[:at], *needle, *filler[at:room], *asked]
        [answer] = llm.generate([prompt], icc.SamplingParams(max_tokens=8, temperature=0.0))
        found += number in answer.text
    return found


def main() -> None:
    """Print one row per policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--engines", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--needles", type=int, default=5)
    parser.add_argument("--policy", action="append")
    options = parser.parse_args()
    files = sorted(options.text.glob("*.md")) if options.text.is_dir() else [options.text]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    options.engines.mkdir(exist_ok=True)
    for policy in options.policy or POLICIES:
        with icc.load(engine(options.model, options.engines, policy), threads=1) as llm:
            assert llm.tokenizer is not None
            ids = llm.tokenizer.encode(text, add_special_tokens=False)
            pieces = [ids[i * CONTEXT : (i + 1) * CONTEXT] for i in range(options.windows)]
            nats = sum(scored(llm, piece[:-SCORED], piece[-SCORED:]) for piece in pieces)
            row = {"policy": policy, "perplexity": round(math.exp(nats / SCORED / len(pieces)), 3)}
            depths = [(i + 0.5) / options.needles for i in range(options.needles)]
            for name, question in QUESTIONS.items():
                row[name] = f"{needles(llm, ids[CONTEXT:], depths, question)} of {options.needles}"
            if policy == "all" or "window=508" in policy:
                long = ids[: LONG * 512]
                row["long"] = round(math.exp(scored(llm, long[:1], long[1:]) / (len(long) - 1)), 3)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
