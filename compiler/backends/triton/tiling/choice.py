"""Choosing among a kernel's possible tilings: a tuned entry if the GPU was measured, else the cost model's best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ....errors import UsageError
from ....targets import Target
from ...errors import CodegenError

Config = dict[str, int]  # e.g. {"m": 64, "n": 128, "k": 64, "warps": 4, "stages": 3}


@dataclass(frozen=True)
class RefusedTiling:
    """A tiling that was tried for a choice, and why the resulting kernel is not used. spills: bytes per thread, if that
    is all that is wrong with it; it is used if nothing else is left."""

    key: str
    config: Config
    reason: str
    spills: int = 0

    def __str__(self) -> str:
        tiling = ", ".join(f"{name} {value}" for name, value in self.config.items())
        return f"{self.key}: {tiling}: {self.reason}"


@dataclass(frozen=True)
class Tuner:
    """Answers for one target. `tuned` maps a key to the config that was fastest on a device of this target.

    refused: tilings that must not be chosen any more. taken: all choices and their answers so far, in order.
    """

    target: Target
    tuned: Mapping[str, Config] = field(default_factory=dict)
    refused: tuple[RefusedTiling, ...] = ()
    taken: list[tuple[str, Config]] = field(default_factory=list)

    def pick(self, key: str, candidates: Sequence[Config], cost: Callable[[Config], float]) -> Config:
        """The config for `key`: the tuned one if it is among the candidates, else the one of least estimated cost, or,
        if all were refused, the one that spills least.

        cost: seconds, or infinity for a config that cannot run on the target. Ties go to the first. UsageError if no
        candidate can run, CodegenError if all that can run were refused.
        """
        found = self._pick(key, candidates, cost)
        self.taken.append((key, found))
        return found

    def _pick(self, key: str, candidates: Sequence[Config], cost: Callable[[Config], float]) -> Config:
        refused = [r for r in self.refused if r.key == key]
        candidates = [c for c in candidates if all(c != r.config for r in refused)]
        known = self.tuned.get(key)
        if known is not None and known in candidates:
            return known
        best = min(candidates, key=cost, default=None)
        if best is None or cost(best) == float("inf"):
            if spilling := [r for r in refused if r.spills]:
                return min(spilling, key=lambda r: r.spills).config
            if refused:
                raise CodegenError(
                    f"all {len(refused)} tilings of {key} that fit {self.target.name} are refused, the first because "
                    f"it {refused[0].reason}",
                    "this is a gap in icc; please report it",
                )
            raise UsageError(f"no tiling of {key} fits target {self.target.name!r}", "this is a gap in icc")
        return best


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
