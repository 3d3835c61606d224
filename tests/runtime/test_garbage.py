"""A process that serves collects little garbage at a time, and often."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from icc.runtime.garbage import settle

class Node:
    alive = 0

    def __init__(self):
        Node.alive += 1
        self.me = self

    def __del__(self):
        Node.alive -= 1

gc.set_threshold(50_000, 20, 20)
lives_on = [Node() for _ in range(300_000)]
settle()
young, most = [], 0
for number in range(300_000):
    young.append(Node())
    if len(young) == 2_000:  # they outlive the collections of young objects
        young.clear()
    most = max(most, Node.alive - len(lives_on))
print(most)
"""


def test_garbage_does_not_wait_for_a_quarter_of_what_lives_on() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    assert int(found) < 30_000
