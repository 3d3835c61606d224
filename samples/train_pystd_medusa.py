"""Train `samples/pystd-medusa`: Medusa heads of the sample checkpoint, on its own continuations of its training text.

Run it as `python samples/train_pystd_medusa.py`; cut off, it goes on where it was. The held-out modules of the corpus
are not in the text.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from icc.compiler.console import ConsoleReporter
from icc.compiler.heads.train import TrainHeadsOptions, train_heads
from pystd_corpus import STDLIB, passes, read_corpus

SAMPLES = Path(__file__).parent
TEXT_CHARACTERS = 8_000_000  # enough for windows that do not overlap


def main() -> None:
    """Parse the command line, write the text, train, and print the held-out accuracy of each head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SAMPLES / "pystd-medusa")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()

    chosen.out.mkdir(parents=True, exist_ok=True)
    text = chosen.out / "text.partial"
    documents = next(passes(read_corpus(STDLIB), random.Random(chosen.seed)))  # in random order
    text.write_text("\n".join(documents)[:TEXT_CHARACTERS], encoding="utf-8")
    options = TrainHeadsOptions(
        SAMPLES / "pystd",
        text,
        chosen.out,
        heads=chosen.heads,
        layers=chosen.layers,
        sequences=chosen.sequences,
        epochs=chosen.epochs,
        seed=chosen.seed,
        generate=True,
    )
    with ConsoleReporter() as reporter:
        accuracy = train_heads(options, reporter)
    text.unlink()
    for head, ranks in enumerate(accuracy):
        print(f"head {head}: " + ", ".join(f"top-{rank + 1} {value:.3f}" for rank, value in enumerate(ranks)))


if __name__ == "__main__":
    main()
