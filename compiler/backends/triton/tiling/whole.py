"""Tilings of products that are stages of one step kernel, chosen for the kernel as a whole.

The stage that needs the most registers and shared memory limits how many programs of a step kernel a multiprocessor
holds. A product's columns per program and its number of buffers do not change results, so all stages can be made small
enough for more programs; the estimate weighs the cost of that against the gain, and the whole against separate
launches. None of this was timed: its terms come from timed products and splits, except CROWDED and BETWEEN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from .choice import Config
from .estimate import MERGE, Estimate
from .machine import LATENCY, LAUNCH, Machine
from .product import ProductFacts

MOST = 8  # programs per multiprocessor
CROWDED = 0.26  # a stage takes 2^0.26 = 1.2 times as long on half as many programs as its launch has (an estimate)
BETWEEN = 0.4e-6  # seconds that a launch in a step takes besides its estimate: five measured steps, from -0.6 to 1.0
_FREE = ("n", "stages")  # fields of a tiling that do not change results
LAUNCHES: Config = {"resident": 0}  # the choice of no step kernel


@dataclass(frozen=True)
class StageProduct:
    """A product that is a stage. key, launched: the tuner's key for its launch, and the answer. tilings: tilings that
    give the same bits. asks: whether its first weights are prefetched before it waits."""

    facts: ProductFacts
    key: str
    launched: Config
    tilings: tuple[Config, ...]
    asks: bool


def same_bits(config: Config, candidates: Sequence[Config]) -> tuple[Config, ...]:
    """The candidates that add up sums in the same order as `config`."""
    kept = {name: value for name, value in config.items() if name not in _FREE}
    return tuple(c for c in candidates if {name: value for name, value in c.items() if name not in _FREE} == kept)


@dataclass(frozen=True)
class WholeTilings:
    """The stages of a step kernel: products, and None for a stage that has only one form. waits: how many stages
    wait."""

    machine: Machine
    stages: tuple[StageProduct | None, ...]
    waits: int

    @property
    def products(self) -> list[StageProduct]:
        """The stages that have several tilings."""
        return [stage for stage in self.stages if stage is not None]

    def candidates(self) -> list[Config]:
        """The choices: numbers of programs per multiprocessor, largest first, then separate launches."""
        return [*({"resident": held} for held in range(MOST, 0, -1)), LAUNCHES]

    def seconds(self, config: Config) -> float:
        """Estimated seconds of the parts that differ: products, launches and waits; infinity if stages do not fit."""
        held = config["resident"]
        if not held:
            products = sum(Estimate(self.machine).seconds(p.facts, p.launched) for p in self.products)
            return products + LAUNCH * (len(self.stages) - len(self.products)) + BETWEEN * len(self.stages)
        found = self.tilings(held)
        if found is None:
            return inf
        products = sum(self._stage_seconds(p, found[p.key], held) for p in self.products)
        asked = sum(p.asks for p in self.products)
        return LAUNCH + BETWEEN + products + self.waits * (MERGE + LATENCY) - min(asked, self.waits) * LATENCY

    def tilings(self, held: int) -> Mapping[str, Config] | None:
        """The tiling of each product, by its key, if a multiprocessor is to hold `held` programs of the kernel; None if
        some product has no tiling that fits."""
        found: dict[str, Config] = {}
        for product in self.products:
            fitting = [c for c in product.tilings if self.room(product, c) >= held]
            if not fitting:
                return None
            found[product.key] = min(fitting, key=lambda c: self._stage_seconds(product, c, held))
        return found

    def registers(self, held: int, warps: int) -> int:
        """The most registers per thread with which `held` programs fit; 0: as many as a thread can have."""
        most = self.machine.target.registers // (held * warps * self.machine.target.warp_size) // 8 * 8
        return most if most < 255 else 0

    def room(self, product: StageProduct, config: Config) -> int:
        """Programs that fit into the shared memory of a multiprocessor."""
        target, needed = self.machine.target, Estimate(self.machine).shared_bytes(product.facts, config)
        most = (target.shared_memory_kib * 1024 + target.reserved_shared) // (needed + target.reserved_shared)
        return most if needed <= target.shared_memory_kib * 1024 else 0

    def _stage_seconds(self, product: StageProduct, config: Config, held: int) -> float:
        """A product's seconds as a stage, without a launch of its own."""
        estimate = Estimate(self.machine, held)
        alone = self._at_once(product, product.launched, self.room(product, product.launched))
        crowded = max(alone / self._at_once(product, config, held), 1.0) ** CROWDED
        return crowded * (estimate.seconds(product.facts, config) - LAUNCH)

    def _at_once(self, product: StageProduct, config: Config, held: int) -> int:
        """Programs of a multiprocessor that have a tile at the same time."""
        tiles = -(-product.facts.columns // config["n"])
        return max(min(held, -(-tiles // self.machine.target.multiprocessors)), 1)
