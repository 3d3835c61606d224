"""Which cases `make test` leaves to others, so that it takes minutes: rare.txt, one test id per line.

    python tests/rare.py FOLDER [--seconds 900]     write rare.txt by what a run took, see cpu_seconds.py

Every test function keeps its cheapest case, and every test without parameters runs. Of all other cases the dearest are
rare, until what is left takes about so many seconds of CPU time. `make soak` runs them all, `.ci/run` an eighth of
them, another one each day (ICC_RARE=0/8 .. 7/8, or `all`), and a test that is named by its id always runs.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("rare.txt")


def left_out(config: pytest.Config, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of these, what does not run now."""
    asked = os.environ.get("ICC_RARE", "")
    if asked == "all" or any("::" in name for name in config.args):
        return []
    number, _, count = asked.partition("/")
    rare = {name: place for place, name in enumerate(LIST.read_text().splitlines())}
    found = [item for item in items if item.nodeid in rare]
    return [item for item in found if not count or rare[item.nodeid] % int(count) != int(number)]


def chosen(seconds: dict[str, float], most: float) -> list[str]:
    """The rare ones of cases that took so many seconds, sorted, so that the others take `most`."""
    functions: dict[str, list[str]] = defaultdict(list)
    for name in seconds:
        functions[name.partition("[")[0]].append(name)
    kept = {min(cases, key=lambda name: (seconds[name], name)) for cases in functions.values()}
    left, found = sum(seconds.values()), list[str]()
    for name in sorted(seconds.keys() - kept, key=lambda name: -seconds[name]):
        if left <= most:
            break
        left -= seconds[name]
        found.append(name)
    print(f"{len(found)} of {len(seconds)} cases are rare; the others took {left:.0f} of {sum(seconds.values()):.0f} s")
    return sorted(found)


def main() -> None:
    """Write rare.txt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=900)
    given = parser.parse_args()
    seconds: dict[str, float] = defaultdict(float)
    for file in given.folder.glob("*.tsv"):
        for line in file.read_text().splitlines():
            name, _, taken = line.split("\t")[:3]
            seconds[name] += float(taken)
    LIST.write_text("".join(f"{name}\n" for name in chosen(seconds, given.seconds)))


if __name__ == "__main__":
    main()
