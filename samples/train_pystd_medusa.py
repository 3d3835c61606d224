"""Train `samples/pystd-medusa`: Medusa heads of the sample checkpoint, on its own continuations of its training text.

Run it as `python samples/train_pystd_medusa.py`; cut off, it goes on where it was. The continuations are written by an
engine of the checkpoint, which is many times faster than transformers. The held-out modules of the corpus are not in
the text.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import icc
import torch
from icc.compiler.console import ConsoleReporter
from icc.compiler.speculate.train import TrainHeadsOptions, train_heads
from pystd_corpus import BOS_ID, STDLIB, passes, read_corpus
from tokenizers import Tokenizer

SAMPLES = Path(__file__).parent
MODEL = SAMPLES / "pystd"
LENGTH, PROMPT = 256, 64  # tokens of a window, and of it those that are text
BATCH = 64  # prompts per call


def own_windows(count: int, seed: int) -> torch.Tensor:
    """int64 [count, LENGTH]: the beginning of text, a piece of the corpus, and what the model writes after it."""
    documents = next(passes(read_corpus(STDLIB), random.Random(seed)))  # in random order
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    pieces: list[list[int]] = []
    for document in tokenizer.encode_batch_fast(documents, add_special_tokens=False):
        starts = range(0, len(document.ids) - PROMPT, LENGTH)
        pieces += [[BOS_ID, *document.ids[start : start + PROMPT - 1]] for start in starts]
        if len(pieces) >= 2 * count:
            break
    random.Random(seed).shuffle(pieces)
    params = icc.SamplingParams(max_tokens=LENGTH - PROMPT, temperature=0.0, ignore_eos=True)
    windows: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        engine = icc.compile(MODEL, Path(folder) / "pystd.engine", target="native", max_seq_len=LENGTH)
        with icc.load(engine) as llm:
            for start in range(0, count, BATCH):
                prompts = pieces[start : min(start + BATCH, count)]
                written = llm.generate(prompts, params)
                windows += [[*p, *w.token_ids] for p, w in zip(prompts, written, strict=True)]
    return torch.tensor(windows)


def main() -> None:
    """Parse the command line, let the model write, train, and print the held-out accuracy of each head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SAMPLES / "pystd-medusa")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--windows", type=int, default=6144)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    windows = own_windows(chosen.windows, chosen.seed)
    options = TrainHeadsOptions(
        MODEL,
        STDLIB,
        chosen.out,
        heads=chosen.heads,
        layers=chosen.layers,
        sequences=chosen.windows,
        length=LENGTH,
        epochs=chosen.epochs,
        seed=chosen.seed,
    )
    with ConsoleReporter() as reporter:
        accuracy = train_heads(options, reporter, windows)
    for head, ranks in enumerate(accuracy):
        print(f"head {head}: " + ", ".join(f"top-{rank + 1} {value:.3f}" for rank, value in enumerate(ranks)))


if __name__ == "__main__":
    main()
