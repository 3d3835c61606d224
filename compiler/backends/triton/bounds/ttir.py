"""Reads the text of Triton's IR before layouts (TTIR) into operations with their regions, as far as the analysis of
addresses needs it. The IR of a kernel is one function, in which everything that it calls is inlined."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_RESULTS = re.compile(r"^(%[\w.$-]+(?:, %[\w.$-]+)*)(?::(\d+))? = ")
_NAME = re.compile(r'^"?([a-z]\w*(?:\.\w+)+)"?')
_VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LOCATION = re.compile(r"\s+loc\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\)")


@dataclass(frozen=True)
class TtirType:
    """The type of a value. element: i32, f16 and such; for pointers, the type that they point to. shape: () for
    scalars."""

    shape: tuple[int, ...]
    element: str
    pointer: bool = False

    @property
    def bits(self) -> int:
        """Bits of an element; for a pointer, of the element that it points to."""
        return int(re.sub(r"\D.*", "", self.element.lstrip("bfi").replace("index", "64")) or 8)

    @staticmethod
    def parse(text: str) -> TtirType:
        """Parse tensor<4x32x!tt.ptr<bf16>>, !tt.ptr<i8>, i32 and such."""
        text = text.strip()
        shape: tuple[int, ...] = ()
        if text.startswith("tensor<"):
            inner = text[len("tensor<") : text.rindex(">")]
            dims = re.match(r"(?:\d+x)*", inner)
            assert dims is not None
            shape = tuple(int(d) for d in dims[0].split("x") if d)
            text = inner[dims.end() :]
        if text.startswith("!tt.ptr<"):
            return TtirType(shape, text[len("!tt.ptr<") :].rstrip(">").split(",")[0], True)
        return TtirType(shape, text)


@dataclass
class TtirOp:
    """One operation. text: the rest of its line after its name. types: the types after the last colon, in order.

    regions: the blocks of each region. carried: for each value that a loop passes from one iteration to the next, its
    name in the body and that of its first value. counter, bounds: the name of a counting loop's counter, and those of
    its first value, end and step.
    """

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    text: str
    types: tuple[TtirType, ...]
    regions: list[list[TtirBlock]] = field(default_factory=list)
    carried: tuple[tuple[str, str], ...] = ()
    counter: str = ""
    bounds: tuple[str, ...] = ()

    def attribute(self, name: str) -> int:
        """An integer attribute; KeyError if the operation has none of that name."""
        found = re.search(rf"\b{name} = (-?\d+)", self.text)
        if found is None:
            raise KeyError(name)
        return int(found[1])

    @property
    def constant(self) -> int | None:
        """The integer of a constant that has one value in all elements; None for other operations."""
        found = re.match(r" (?:dense<)?(-?\d+|true|false)>?(?: :|$)", self.text)
        if self.name != "arith.constant" or found is None:
            return None
        return {"true": 1, "false": 0}[found[1]] if found[1] in ("true", "false") else int(found[1])

    @property
    def result_types(self) -> list[TtirType]:
        """The types of the results; empty if the results come from its regions."""
        if self.name == "arith.constant" and not self.types:
            return [TtirType((), "i1")]
        if not self.results or self.name in ("scf.for", "scf.while", "scf.if") or not self.types:
            return []
        match self.name:
            case "arith.cmpi" | "arith.cmpf":
                return [TtirType(self.types[0].shape, "i1")]
            case "tt.load":
                return [TtirType(self.types[0].shape, self.types[0].element)]
            case "tt.addptr":
                return [self.types[0]]
            case "tt.split":
                return [self.types[-1]] * len(self.results)
        return list(self.types[-len(self.results) :])


@dataclass
class TtirBlock:
    """Operations that run one after the other. label: its name, "" for a block that nothing jumps to."""

    label: str = ""
    arguments: tuple[tuple[str, TtirType], ...] = ()
    ops: list[TtirOp] = field(default_factory=list)


@dataclass(frozen=True)
class TtirFunction:
    """The kernel: its arguments by name in order, and its blocks."""

    arguments: tuple[tuple[str, TtirType], ...]
    blocks: list[TtirBlock]


def parse(text: str) -> TtirFunction:
    """The function in the text of a module. Every value gets a name that no other value has. ValueError if the text has
    another form."""
    lines = iter([line.strip() for line in _LOCATION.sub("", text).splitlines()])
    for line in lines:
        if line.startswith("tt.func"):
            found = re.search(r"\((%.*)\)(?: attributes .*)? \{$", line)
            reader = _TtirReader(lines)
            scope: dict[str, str] = {}
            arguments = tuple(reader.arguments(found[1] if found else "", scope))
            return TtirFunction(arguments, reader.region(scope)[0])
    raise ValueError("there is no function")


class _TtirReader:
    """Reads a text line by line. If two sibling regions use one name for two values, the values get two names."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines, self._count = lines, 0

    def _new(self, name: str, scope: dict[str, str]) -> str:
        self._count += 1
        scope[name] = f"{name}@{self._count}"
        return scope[name]

    def arguments(self, text: str, scope: dict[str, str]) -> Iterator[tuple[str, TtirType]]:
        """The names and types in a list of arguments `%name: type`."""
        for name, kind in re.findall(r"(%[\w.$-]+): ((?:tensor<[^%]*?>+|!tt\.ptr<\w+(?:, \d+)?>|\w+))", text):
            yield self._new(name, scope), TtirType.parse(kind)

    def region(self, scope: dict[str, str]) -> tuple[list[TtirBlock], str]:
        """The blocks up to the brace that closes the region, and that line."""
        blocks = [TtirBlock()]
        for line in self._lines:
            if line.startswith("}"):
                return blocks, line
            if line.startswith("^"):
                label = re.match(r"\^\w+", line)
                assert label is not None
                found = TtirBlock(label[0], tuple(self.arguments(line, scope)))
                if blocks[-1].ops or blocks[-1].label:
                    blocks.append(found)
                else:
                    blocks[-1] = found
            elif line and not line.startswith(("//", "#")):
                blocks[-1].ops.append(self._op(line, scope))
        raise ValueError("a region has no end")

    def _op(self, line: str, scope: dict[str, str]) -> TtirOp:
        given: list[str] = []
        if found := _RESULTS.match(line):
            count = int(found[2] or 0)
            given = [f"{found[1]}#{i}" for i in range(count)] if count else found[1].split(", ")
            line = line[found.end() :]
        name = _NAME.match(line)
        if name is None:
            raise ValueError(f"no operation: {line[:80]}")
        rest = line[name.end() :]
        op = TtirOp(name[1], (), (), rest, ())
        inner = dict(scope)
        if op.name in ("scf.for", "scf.while"):
            self._loop(op, scope, inner)
        while rest.endswith(("{", "({")):
            blocks, rest = self.region(dict(inner))
            op.regions.append(blocks)
            op.text += "\n" + rest
        plain = _STRING.sub('""', op.text)
        values, _, kinds = plain.rpartition(" : ")
        if not op.operands:
            op.operands = tuple(scope[value] for value in _VALUE.findall(values or kinds))
        op.types = tuple(_types(kinds)) if values else ()
        op.results = tuple(self._new(result, scope) for result in given)
        return op

    def _loop(self, op: TtirOp, scope: dict[str, str], inner: dict[str, str]) -> None:
        """Set a loop's counter, bounds and carried values."""
        text = op.text
        if op.name == "scf.for":
            found = re.match(r" (%[\w.$-]+) = (\S+) to (\S+) step (\S+?)(?: |$)", text)
            if found is None:
                raise ValueError(f"a loop of another form: {text[:80]}")
            counter, *bounds = found.groups()
            op.bounds = tuple(scope[name] for name in bounds)
            op.counter = self._new(counter, inner)
            text = text.partition("iter_args")[2]
        pairs = [(name, scope[value]) for name, value in re.findall(r"(%[\w.$-]+) = (%[\w.$#-]+)", text)]
        op.carried = tuple((self._new(name, inner), value) for name, value in pairs)
        op.operands = (*op.bounds, *(value for _, value in op.carried))


def _types(text: str) -> Iterator[TtirType]:
    """All types in a text, in their order."""
    for found in re.finditer(
        r"tensor<(?:\d+x)*(?:!tt\.ptr<[\w, ]+>|\w+)>|!tt\.ptr<[\w, ]+>|\b(?:[iuf]\d+\w*|bf16|index)\b", text
    ):
        yield TtirType.parse(found[0])
