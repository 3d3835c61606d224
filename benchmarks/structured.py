"""Which JSON schemas become grammars, and whether answers under these grammars are valid, as a table.

    python benchmarks/structured.py [DIR ...] [--answers N] [--tokens N] [--sample N]

The schemas are the JSON-Schema-Test-Suite of the tests (draft 2020-12, without remote references), and those of every
DIR with a schema in each `*.json` below it, such as JSONSchemaBench's `data/*`. Answers are random walks with the
sample model's tokenizer; `jsonschema` judges them. `unsatisfiable`: schemas refused because no value is valid; `cut`:
answers that were incomplete after --tokens tokens; `dead ends`: answers that no token could continue.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

TESTS = Path(__file__).parents[1] / "tests" / "runtime" / "grammars"
sys.path.insert(0, str(TESTS))
from icc.runtime.errors import RequestError  # noqa: E402
from walks import Walker  # noqa: E402

COLUMNS = (
    "schemas", "compiled", "unsatisfiable", "refused", "answers", "cut", "invalid", "dead ends", "unjudged",
    "ms median", "ms p99", "ms most",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--answers", type=int, default=4, help="random walks per schema")
    parser.add_argument("--tokens", type=int, default=120, help="maximum length of an answer")
    parser.add_argument("--sample", type=int, default=200, help="random schemas per folder; 0 takes all")
    parser.add_argument("--show", action="store_true", help="print which schemas are refused or answered wrongly")
    options = parser.parse_args()
    print("| set | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 1))
    suite = json.loads((TESTS / "suite" / "draft2020-12.json").read_text())
    groups = [(f"{name}: {group['description']}", group["schema"]) for name in suite for group in suite[name]]
    _row("JSON-Schema-Test-Suite", groups, options)
    for folder in options.folders:
        files = sorted(folder.rglob("*.json"))
        files = random.Random(1).sample(files, options.sample) if 0 < options.sample < len(files) else files
        _row(folder.name, [(file.name, json.loads(file.read_text())) for file in files], options)


def _row(title: str, schemas: list[tuple[str, Any]], options: argparse.Namespace) -> None:
    walker, count, times = Walker(), Counter(), []
    for name, schema in schemas:
        count["schemas"] += 1
        start = time.perf_counter()
        try:
            make = walker.compile(schema)
        except RequestError as error:
            count["unsatisfiable" if error.message.startswith("no value") else "refused"] += 1
            _say(options, name, error.message)
            continue
        finally:
            times.append(1e3 * (time.perf_counter() - start))
        count["compiled"] += 1
        for seed in range(options.answers):
            text, end = walker.walk(make(), seed, options.tokens)
            found = {"length": "cut", "error": "dead ends"}.get(end) or _judged(schema, text)
            count[found] += 1
            if found in ("invalid", "dead ends"):
                _say(options, name, f"{found}: {text[:200]}")
    times.sort()
    count["ms median"], count["ms p99"] = round(statistics.median(times)), round(times[int(0.99 * len(times))])
    count["ms most"] = round(times[-1])
    print(f"| {title} | " + " | ".join(str(count[column]) for column in COLUMNS) + " |", flush=True)


def _judged(schema: Any, text: str) -> str:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        return "answers" if kind(schema).is_valid(json.loads(text)) else "invalid"
    except Exception:  # a schema that jsonschema cannot use
        return "unjudged"


def _say(options: argparse.Namespace, name: str, words: str) -> None:
    if options.show:
        print(f"{name}: {words}", file=sys.stderr)


if __name__ == "__main__":
    main()
