"""Things that the source has in one place only: arguments of attention by name, the parsing of policies, class names,
and kernels whose files are independent of each other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TWICE = {"Program", "Step"}  # the compiler's classes extend the runtime's


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def lines_with(pattern: str, *folders: str) -> list[str]:
    found = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources(*folders)
        for line in path.read_text().splitlines()
        if found.search(line)
    ]


def test_no_argument_is_known_by_a_number_of_two_digits() -> None:
    assert not lines_with(r"node\.args\[1[0-9]", "compiler", "passes")


def test_a_policy_is_read_once() -> None:
    found = lines_with(r"read_eviction\(", "compiler", "passes", "runtime")
    assert [line.partition(":")[0] for line in found] == ["compiler/eviction.py", "compiler/options.py"], found


def test_token_types_are_an_input_like_any_other() -> None:
    """Only the reader of engines of format 2 has a field of that name."""
    found = lines_with("token_types", "compiler/graph", "compiler/engine", "runtime")
    assert [line.partition(":")[0] for line in found] == ["runtime/format/version2.py"], found


def test_class_names_stand_in_one_file() -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for path in sources("compiler", "passes", "runtime"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(str(path.relative_to(ROOT)))
    twice = {name: sorted(files) for name, files in places.items() if len(files) > 1 and name not in TWICE}
    assert not twice, "a name in two rooms has to be looked up: " + str(twice)


def imported(path: Path) -> Iterator[tuple[Path, str]]:
    """The files of its own folder that a file imports, also in functions, and the names that it imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                yield path.parent / f"{node.module or alias.name}.py", alias.name


def test_files_of_kernels_are_no_object_in_several_files() -> None:
    """No file imports itself directly or indirectly, and none uses private names of another file."""
    for folder in ("triton/kernels", "triton/tiling", "cpu/kernels"):
        files = sorted((ROOT / "compiler/backends" / folder).glob("*.py"))
        TopologicalSorter({path: {file for file, _ in imported(path)} for path in files}).prepare()  # CycleError
        for path in files:
            text = path.read_text()
            taken = [name for _, name in imported(path) if name.startswith("_")]
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
            private = {node.attr for node in nodes if re.match("_[a-z]", node.attr)}
            elsewhere = [name for name in private if not re.search(rf"(def |self\.){name}\b", text)]
            assert not taken + elsewhere, f"{path.name}: {taken + elsewhere} is private to another file"
