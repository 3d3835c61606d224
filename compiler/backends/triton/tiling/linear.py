"""The tiling of a product on a target: the cheapest among those of its mode and those that unpack W first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....targets import Target
from .choice import Config, Tuner, power_of_two
from .estimate import ISSUE_PER_SM, Estimate
from .machine import INLINE, LATENCY, LAUNCH, Machine
from .modes.eight import MANY
from .modes.table import DENSE_MODE, ROWS8
from .product import ProductFacts

UNPACK = 14.0  # instructions per value of a kernel that only unpacks a matrix
UNPACK_BYTES = 4.0  # the same, to 8-bit floats
ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 4096)  # classes of row counts; one choice for each


def pick(product: ProductFacts, tuner: Tuner) -> Config:
    """The tiling for a product; one choice for all row counts of a class, so that phases share objects."""
    known, tilings = of_class(product), LinearTilings(tuner.target)
    return tuner.pick(known.key, tilings.candidates(known), lambda config: tilings.seconds(known, config))


def of_class(product: ProductFacts) -> ProductFacts:
    """The facts of the class that a product belongs to, for which the choice is made."""
    rows = next((r for r in ROWS if product.rows <= r), ROWS[-1])
    if product.few:
        rows = power_of_two(product.rows)  # each part has its own sums
    elif product.mode.eight and not product.coded and product.rows <= INLINE:
        rows = product.rows  # which no separate kernel quantizes to 8 bits
    return replace(product, rows=rows)


@dataclass(frozen=True)
class LinearTilings:
    """The tilings of products on one target."""

    target: Target

    @property
    def machine(self) -> Machine:
        """The target's properties for the estimates."""
        return Machine(self.target)

    def candidates(self, p: ProductFacts) -> list[Config]:
        """All tilings worth trying."""
        unpacked = [{**c, "unpacked": 1} for c in self.candidates(_dense(p))] if p.unpacks else []
        eight = [{**c, "eight": 1} for c in self.candidates(_eight(p))] if p.many else []
        floats = self.candidates(_floats(p)) if p.many and p.many.floats and p.unpacks and p.rows >= MANY else []
        floats = [{**c, "unpacked": 1, "eight": 1} for c in floats]
        return [*p.mode.candidates(self.machine, p), *unpacked, *eight, *floats]

    def seconds(self, p: ProductFacts, c: Config) -> float:
        """Estimated seconds; infinity if the tiling does not fit."""
        if c.get("unpacked"):
            eight = bool(c.get("eight"))
            plain = {k: v for k, v in c.items() if k not in ("unpacked", "eight")}
            product = self.seconds(_floats(p) if eight else _dense(p), plain)
            return 2 * self._unpack_seconds(p, eight) + product  # steps of a class may have half of its rows
        if c.get("eight"):
            return Estimate(self.machine).seconds(_eight(p), c)
        return Estimate(self.machine).seconds(p, c)

    def _unpack_seconds(self, p: ProductFacts, eight: bool) -> float:
        """Estimated seconds to convert all of W to a matrix of 16 or 8 bits: read, compute value by value, write."""
        assert p.codes is not None
        values = p.n * p.k
        memory = self.machine.read.memory_seconds(values * (p.codes.value_bytes + (1 if eight else 2)))
        each = UNPACK_BYTES if eight else p.codes.tile_instructions + 3 if p.mode.value_operands else UNPACK
        issue = values * each / 32 / (ISSUE_PER_SM * self.machine.target.multiprocessors)
        return LAUNCH + LATENCY + max(memory, issue)


def _dense(p: ProductFacts) -> ProductFacts:
    """The facts with another mode: W in 16 bits."""
    return replace(p, mode=DENSE_MODE, codes=None, many=None)


def _eight(p: ProductFacts) -> ProductFacts:
    """The facts with another mode: that of many rows."""
    assert p.many is not None
    return replace(p, mode=p.many, many=None)


def _floats(p: ProductFacts) -> ProductFacts:
    """The facts with another mode: W and rows as 8-bit floats."""
    assert p.codes is not None
    return replace(p, mode=ROWS8["fp8"], codes=replace(p.codes, bits=8), many=None)
