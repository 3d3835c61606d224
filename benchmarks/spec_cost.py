"""The cost of a drafter that is never right: every drafter against plain decoding, interleaved.

    python benchmarks/spec_cost.py ENGINE --drafters replay,ngram,medusa --threads 2 --seconds 50

After the drafter has done its work, every first guess is replaced by a token that the model never chooses. A round
runs each drafter once and plain decoding twice, in random order: a drafter's cost is its decode time over that of the
first plain run, and the second plain run over the first is the control. Prints medians over the rounds with 95 %
intervals (by ranks, because some runs are disturbed).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence

import icc
from icc.runtime.batch.scheduled import Draft
from icc.runtime.llm import LLM
from icc.runtime.speculate.drafter import Drafter, Proposal, Wish
from icc.runtime.speculate.speculator import Speculator
from spec_replay import Replay, rate

Truth = dict[tuple[int, ...], Sequence[int]]


class Silent(Drafter):
    """A drafter that never guesses, which leaves only the bookkeeping of speculation."""

    name, first_rate = "silent", 0.5

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        return {}


class Wrong(Drafter):
    """A drafter made always wrong: it keeps its cost and has no gain. never: tokens that the model never chooses, by
    which making guesses wrong takes almost no time."""

    def __init__(self, drafter: Drafter, never: Sequence[int]) -> None:
        self._drafter, self._never = drafter, never
        self.name, self.first_rate, self.observes = drafter.name, drafter.first_rate, drafter.observes
        self.backlog, self.read, self.knows = drafter.backlog, drafter.read, drafter.knows
        self.close, self.forget, self.observe = drafter.close, drafter.forget, drafter.observe

    def propose(self, wishes: Sequence[Wish]) -> Mapping[int, Proposal]:
        found = self._drafter.propose(wishes)
        return {i: Proposal(_spoilt(proposal.draft, self._never), proposal.chances) for i, proposal in found.items()}


def _spoilt(draft: Draft, never: Sequence[int]) -> Draft:
    """The draft with wrong tokens at depth 1; siblings stay different."""
    if draft.is_chain:
        return Draft((never[0], *draft.token_ids[1:]), draft.parents)
    guesses = zip(draft.token_ids, draft.parents, strict=True)
    return Draft(tuple(token if parent >= 0 else never[i] for i, (token, parent) in enumerate(guesses)), draft.parents)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high) of the ratios, in percent above 1; low and high end a 95 % interval."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    places = (len(values) / 2 - half, (len(values) - 1) / 2, len(values) / 2 + half)
    low, mid, high = (100 * (ordered[min(max(round(at), 0), len(values) - 1)] - 1) for at in places)
    return low, mid, high


def measure(
    llm: LLM, names: Sequence[str], prompts: Sequence[list[int]], tokens: int, seconds: float, keep: bool
) -> list[dict]:
    """Run rounds for `seconds`; one dict per drafter, and one for the control. keep: share one speculator per drafter
    between requests."""
    truth: Truth = {tuple(prompt): [*rate(llm, prompt, tokens, None)[1], 0, 0] for prompt in prompts}

    def drafter(name: str) -> Drafter:
        if name == "silent":
            return Silent()
        if name == "replay":
            return Replay(truth, 0.9, 15)  # with a high stated acceptance
        found = llm.speculator(name)
        assert found is not None
        return found.drafter

    slope = llm.engine.program.speculation.slope if llm.engine and llm.engine.program.speculation else None
    options = {} if slope is None else {"slope": slope}
    chosen = {token for continuation in truth.values() for token in continuation}
    never = [token for token in range(llm.executor.vocab_size) if token not in chosen]
    drafters = {name: Wrong(drafter(name), never) for name in names}
    kept = {name: Speculator(found, **options) for name, found in drafters.items()}
    ratios: dict[str, list[float]] = {name: [] for name in ("control", *names)}
    drafted = dict.fromkeys(names, 0)
    source, end = random.Random(0), time.perf_counter() + seconds
    turn = 0
    while time.perf_counter() < end:
        prompt = prompts[turn % len(prompts)]
        turn += 1
        took = {}
        for name in source.sample(["plain", "control", *names], len(names) + 2):
            speculator = None
            if name in drafters:
                speculator = kept[name] if keep else Speculator(drafters[name], **options)
                before = speculator.counts.guesses
            speed, found = rate(llm, prompt, tokens, speculator)
            assert list(found) == list(truth[tuple(prompt)][:tokens]), "speculation changed the tokens"
            took[name] = 1 / speed
            if speculator is not None:
                assert speculator.counts.accepted == 0
                drafted[name] += speculator.counts.guesses - before
        for name, values in ratios.items():
            values.append(took[name] / took["plain"])
    results = []
    for name, values in ratios.items():
        low, mid, high = interval(values)
        mean = 100 * (statistics.fmean(values) - 1)
        guesses = drafted.get(name, 0) / len(values)
        results.append(
            {"drafter": name, "tokens": tokens, "rounds": len(values), "guesses": round(guesses, 1),
             "mean_percent": round(mean, 2),
             "cost_percent": round(mid, 2), "low": round(low, 2), "high": round(high, 2)}
        )  # fmt: skip
        print(
            f"{name:<12} {tokens:4d} tokens: {mid:+5.2f} % ({low:+.2f} to {high:+.2f}), mean {mean:+.2f} %, "
            f"{len(values)} rounds, {guesses:.1f} guesses a request",
            flush=True,
        )
    return results


def main() -> None:
    """Parse the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--drafters", default="replay,ngram")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--keep", action="store_true", help="keep the learnt step times and gains between requests")
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", metavar="FILE")
    chosen = parser.parse_args()
    source = random.Random(1)
    with icc.load(chosen.engine, threads=chosen.threads, spec="none", verify=False) as llm:
        # repetitive, so that prompt lookup finds something to guess
        words = [[source.randrange(3, 1000) for _ in range(8)] for _ in range(4)]
        prompts = [(word * chosen.prompt_tokens)[: chosen.prompt_tokens] for word in words]
        results = measure(llm, chosen.drafters.split(","), prompts, chosen.tokens, chosen.seconds, chosen.keep)
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as stream:
            json.dump({"engine": chosen.engine, "threads": chosen.threads, "results": results}, stream, indent=1)


if __name__ == "__main__":
    main()
