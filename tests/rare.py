"""The rare tests, which `make test` leaves out so that it takes minutes: rare.txt has a part and a test id per line.

    python tests/rare.py FOLDER [FOLDER ...] [--seconds 660]    write rare.txt by times of runs, see cpu_seconds.py

Every test file keeps its cheapest test that does real work, which means 0.2 s or more; if that takes more than 8 s or
does not exist, the most expensive of the tests below 0.2 s. Other tests are added, the cheapest first, until all take
about --seconds of CPU time; the rest are rare, also whole functions. A further case of a function counts as twice as
expensive. A shared fixture is counted once, for the first test that needs it. Times in a later folder replace those of
the same test or fixture. A rare test that was not run stays rare, in its part: the folder of one `make test` is enough
to shorten it.

`make soak` runs all. `.ci/run` runs an eighth of the rare tests, a different eighth each day (ICC_RARE=0/8 .. 7/8, or
`all`). All rare tests of a file are in one part, with their fixtures; parts take about equally long. A test that is
named by its id always runs.
"""

from __future__ import annotations

import argparse
import heapq
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("rare.txt")
PARTS = 8
REAL_WORK, AFFORDABLE = 0.2, 8.0  # seconds
STALE = pytest.StashKey[list[str]]()  # key in a run's config: the result of `stale`


def parts() -> dict[str, int]:
    """The rare tests of rare.txt, and the part of each."""
    return {name: int(part) for part, _, name in (line.partition(" ") for line in LIST.read_text().splitlines())}


def left_out(config: pytest.Config, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items that do not run now. Raises pytest.UsageError if ICC_RARE is not one of the above."""
    asked = os.environ.get("ICC_RARE", "")
    if asked not in ("", "all", *(f"{number}/{PARTS}" for number in range(PARTS))):
        raise pytest.UsageError(f"ICC_RARE={asked}: give 0/{PARTS} to {PARTS - 1}/{PARTS}, or all")
    if asked == "all" or any("::" in name for name in config.args):
        return []
    rare, number = parts(), asked.partition("/")[0]
    return [item for item in items if item.nodeid in rare and str(rare[item.nodeid]) != number]


def stale(collected: Iterable[str], root: Path) -> list[str]:
    """Rare ids that name no test: their file is not below `root`, or only other tests of it were collected."""
    found = set(collected)
    files = {name.partition("::")[0] for name in found}
    rare = ((name, name.partition("::")[0]) for name in parts() if name not in found)
    return [name for name, file in rare if file in files or not (root / file).is_file()]


@dataclass
class Taken:
    """CPU seconds of tests without their shared fixtures, the fixtures of each test, and CPU seconds of each
    fixture."""

    tests: dict[str, float] = field(default_factory=dict)
    fixtures: dict[str, frozenset[str]] = field(default_factory=dict)
    shared: dict[str, float] = field(default_factory=dict)

    def read(self, folder: Path) -> None:
        """Add the times that cpu_seconds.py wrote in a run; they replace earlier times of the same tests."""
        tests: dict[str, float] = defaultdict(float)
        for line in (line for file in sorted(folder.glob("*.tsv")) for line in file.read_text().splitlines()):
            name, phase, seconds, *fixtures = line.split("\t")
            if phase == "fixture":
                self.shared[name] = float(seconds)
            else:
                tests[name] += float(seconds)
            if fixtures:
                self.fixtures[name] = frozenset(filter(None, fixtures[0].split(",")))
        self.tests |= tests

    def added(self, names: Iterable[str], paid: set[str]) -> float:
        """CPU seconds of these tests, with each of their fixtures once, except those in `paid`."""
        names = list(names)
        fixtures = set[str]().union(*(self.fixtures.get(name, ()) for name in names)) - paid
        return sum(self.tests[name] for name in names) + sum(self.shared.get(name, 0.0) for name in fixtures)


def _by(names: Iterable[str], separator: str) -> dict[str, list[str]]:
    """Test ids by their part before the first separator: `::` groups by file, `[` by function."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[name.partition(separator)[0]].append(name)
    return found


class _Choice:
    """The tests that are kept, in order of their choice, and their total cost."""

    def __init__(self, taken: Taken) -> None:
        self.taken, self.kept, self.seconds = taken, set[str](), 0.0
        self.functions, self.paid = set[str](), set[str]()
        self.users: dict[str, list[str]] = defaultdict(list)
        for name, fixtures in taken.fixtures.items():
            for fixture in fixtures:
                self.users[fixture].append(name)

    def costs(self, name: str) -> float:
        """CPU seconds that the test adds to the kept ones."""
        return self.taken.added([name], self.paid)

    def price(self, name: str) -> tuple[float, str]:
        """The sort key of tests, smallest for the cheapest."""
        return self.costs(name) * (1 + (name.partition("[")[0] in self.functions)), name

    def keep(self, name: str) -> list[str]:
        """Keep a test; returns the tests whose cost has fallen."""
        self.seconds += self.costs(name)
        self.kept.add(name)
        self.functions.add(name.partition("[")[0])
        new = self.taken.fixtures.get(name, frozenset()) - self.paid
        self.paid |= new
        return [user for fixture in new if self.taken.shared.get(fixture) for user in self.users[fixture]]


def chosen(taken: Taken, most: float) -> dict[str, int]:
    """The rare tests and the part of each, chosen so that the others take at most `most` seconds, if the tests kept for
    each file allow it."""
    choice = _Choice(taken)
    for tests in _by(taken.tests, "::").values():
        real = [name for name in tests if choice.costs(name) >= REAL_WORK]
        first = min(real, key=choice.price, default=None)
        if first is None or (choice.costs(first) > AFFORDABLE and len(real) < len(tests)):
            first = max((name for name in tests if name not in real), key=choice.price)
        choice.keep(first)
    heap = [choice.price(name) for name in taken.tests]
    heapq.heapify(heap)
    while heap:
        known, name = heapq.heappop(heap)
        now = choice.price(name)
        if name in choice.kept:
            continue
        if now[0] > known:  # another case of its function has been kept
            heapq.heappush(heap, now)
        elif choice.seconds + choice.costs(name) <= most:
            for other in choice.keep(name):
                heapq.heappush(heap, choice.price(other))
    rare = _dealt(choice)
    print(f"{len(rare)} of {len(taken.tests)} tests are rare; the others take {choice.seconds:.0f} s")
    return rare


def _dealt(choice: _Choice) -> dict[str, int]:
    """The part of each test that is not kept: files, the most expensive first, go to the part with the least time so
    far."""
    taken = choice.taken
    files = _by(sorted(taken.tests.keys() - choice.kept), "::").values()
    dear_first = sorted(((taken.added(names, choice.paid), names) for names in files), reverse=True)
    totals, found = [0.0] * PARTS, dict[str, int]()
    for seconds, names in dear_first:
        part = totals.index(min(totals))
        totals[part] += seconds
        found |= dict.fromkeys(names, part)
    print("parts of the rare ones:", *(f"{total:.0f} s" for total in totals))
    return dict(sorted(found.items()))


def main() -> None:
    """Write rare.txt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=660)
    given = parser.parse_args()
    taken = Taken()
    for folder in given.folders:
        taken.read(folder)
    not_run = {name: part for name, part in parts().items() if name not in taken.tests}
    rare = sorted((not_run | chosen(taken, given.seconds)).items())
    LIST.write_text("".join(f"{part} {name}\n" for name, part in rare))


if __name__ == "__main__":
    main()
