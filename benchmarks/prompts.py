"""What compiled prompts and schemas save: the time to the first token, and the first use of a schema.

    python benchmarks/prompts.py ENGINE [--rounds N] [--unknown]      ENGINE was compiled with one --prefix
    python benchmarks/prompts.py --forms TOKENIZER.json SCHEMA.json [..]

ENGINE is loaded anew for each request of one token. --forms prints the time of each schema's first use, by its parts,
and after it was prepared. All times are CPU time, which other load changes less than wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import icc
from icc.runtime.format.forms import CompiledForm
from icc.runtime.grammars.compiling import lowered
from icc.runtime.grammars.constraints import Grammars, GrammarVocabulary
from icc.runtime.grammars.sources import of_schema
from icc.runtime.requests.params import SamplingParams

ONCE = SamplingParams(max_tokens=1, temperature=0)
SHORT, LEFT = 16, (1, 4, 8, 16, 30)  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--forms", action="store_true")
    parser.add_argument("--unknown", action="store_true", help="also measure a prompt without compiled tokens: slow")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.forms:
        forms(options.files[0], options.files[1:])
    else:
        first_tokens(options.files[0], options.rounds, options.unknown)


def first_tokens(engine: Path, rounds: int, unknown: bool) -> None:
    [prompt] = json.loads((engine / "prompts.json").read_text())["prompts"]
    tokens, vocab = prompt["tokens"], json.loads((engine / "engine.json").read_text())["model"]["vocab_size"]
    asked = {f"a prompt of {SHORT} tokens": tokens[:SHORT]}
    for left in LEFT:
        asked[f"a prompt of which {left} are not compiled"] = [*tokens[: prompt["length"]], *tokens[:left]]
    found = {name: [seconds(engine, given) for _ in range(rounds)] for name, given in asked.items()}
    if unknown:
        words = [(7 * n + 3) % vocab for n in range(len(tokens) + SHORT)]
        found["as many unknown tokens"] = [seconds(engine, words)]
    print(f"{len(tokens)} tokens compiled, {prompt['length']} of them kept; medians of {rounds} processes' CPU time")
    least = statistics.median(next(iter(found.values())))
    for name, times in found.items():
        middle = statistics.median(times)
        print(f"first token of {name}: {1e3 * middle:.1f} ms, {middle / least:.2f}")


def seconds(engine: Path, tokens: Sequence[int]) -> float:
    """CPU seconds to the first token of a newly loaded engine with one thread."""
    with icc.load(engine, threads=1) as llm:
        start = time.process_time()
        llm.generate([list(tokens)], ONCE)
        return time.process_time() - start


def forms(tokenizer: Path, schemas: Sequence[Path]) -> None:
    text = tokenizer.read_text()
    size = len(json.loads(text)["model"]["vocab"])
    print(
        "| schema | lowering | vocabulary | automaton, first mask | first use | prepared |\n|---|---|---|---|---|---|"
    )
    for file in schemas:
        asked = of_schema(json.loads(file.read_text()))
        start = time.process_time()
        known = lowered(asked)
        low = time.process_time() - start
        start = time.process_time()
        _ = GrammarVocabulary(text, size, [0]).structural
        words = time.process_time() - start
        cold = Grammars(text, size, [0])
        start = time.process_time()
        cold.compile(asked)().allowed()
        first = time.process_time() - start
        warm = Grammars(text, size, [0], [CompiledForm(file.name, "schema", asked, known)])
        warm.prepare()
        start = time.process_time()
        warm.compile(asked)().allowed()
        ready = time.process_time() - start
        parts = (low, words, max(first - low - words, 0), first, ready)
        print(f"| {file.stem} | " + " | ".join(f"{1e3 * part:.1f} ms" for part in parts) + " |")


if __name__ == "__main__":
    main()
