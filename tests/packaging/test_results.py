"""Every file of benchmarks/results has a row in its README, with command, date and commit."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def rows() -> list[list[str]]:
    """The cells of each claim: claim, figure, file, command, date and commit."""
    lines = [line for line in (RESULTS / "README.md").read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_every_claim_tells_command_date_and_commit() -> None:
    for claim, _, file, command, made in rows():
        assert all((RESULTS / link).is_file() for link in re.findall(r"\]\(([^)#]+)", file)), claim
        assert re.search(r"`[^`]+`", command), f"{claim}: no command"
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", made), f"{claim}: no date"
        assert re.search(r"\b[0-9a-f]{8}\b", made), f"{claim}: no commit; `in COMMIT` names the one with the figures"


def test_every_file_has_a_claim() -> None:
    told = {link for _, _, file, *_ in rows() for link in re.findall(r"\]\(([^)#]+)", file)}
    assert {path.name for path in RESULTS.glob("*.md")} - told == {"README.md"}
