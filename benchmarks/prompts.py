"""What compiled prompts and forms save: the time to the first token, and the first use of a schema.

    python benchmarks/prompts.py ENGINE [--rounds N]      ENGINE was compiled with one --prefix
    python benchmarks/prompts.py --forms TOKENIZER.json SCHEMA.json [..]

ENGINE: each round loads it anew, and asks for one token behind 16 tokens, then behind the compiled prompt and 16 more
(and, once, behind other words of that length, which nothing is known of). --forms: each schema's first use,
by its parts, and once it was prepared: CPU time of the process, which other load changes less than the clock's.
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
from icc.runtime.llm import LLM
from icc.runtime.requests.params import SamplingParams

ONCE = SamplingParams(max_tokens=1, temperature=0)
ENDS = 16  # tokens behind the prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--forms", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.forms:
        forms(options.files[0], options.files[1:])
    else:
        first_tokens(options.files[0], options.rounds)


def first_tokens(engine: Path, rounds: int) -> None:
    [prompt] = json.loads((engine / "prompts.json").read_text())["prompts"]
    tokens, vocab = prompt["tokens"], json.loads((engine / "engine.json").read_text())["model"]["vocab_size"]
    short, whole, loads = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        for found, given in ((short, tokens[-ENDS:]), (whole, [*tokens, *tokens[:ENDS]])):
            start = time.perf_counter()
            with icc.load(engine) as llm:
                loads.append(time.perf_counter() - start)
                found.append(seconds(llm, given))
    with icc.load(engine) as llm:
        unknown = seconds(llm, [(7 * n + 3) % vocab for n in range(len(tokens) + ENDS)])
    print(f"{len(tokens)} tokens compiled, {prompt['length']} of them kept; medians of {rounds} rounds, in ms")
    print(f"load {1e3 * statistics.median(loads):.0f}")
    print(f"first token behind {ENDS} tokens: {1e3 * statistics.median(short):.1f}")
    print(f"behind the compiled prompt and {ENDS}: {1e3 * statistics.median(whole):.1f}")
    print(f"behind as many unknown tokens: {1e3 * unknown:.0f}")
    print(f"ratio {statistics.median(whole) / statistics.median(short):.2f}")


def seconds(llm: LLM, tokens: Sequence[int]) -> float:
    start = time.perf_counter()
    llm.generate([list(tokens)], ONCE)
    return time.perf_counter() - start


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
