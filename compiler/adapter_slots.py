"""How many adapters, and of what rank, an engine can load at run time: --adapters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..runtime.format.adapters import ADAPTER, MAX_RANK
from .errors import UsageError

__all__ = ["ADAPTER", "ALL_LINEAR", "MAX_RANK", "MAX_SLOTS", "AdapterSlots", "read_adapter_slots"]

MAX_SLOTS = 4096
ALL_LINEAR = "all-linear"  # PEFT's word


@dataclass(frozen=True)
class AdapterSlots:
    """Slots for `count` adapters in memory at once, each of at most rank `rank`, on the linear layers of `targets`.

    targets: patterns (fnmatch) over the ends of module names, such as q_proj, and ALL_LINEAR for all linear layers but
    the LM head, routers and experts; no patterns mean ALL_LINEAR. dora: the slots also hold magnitudes (DoRA).
    """

    count: int
    rank: int
    targets: tuple[str, ...] = ()
    dora: bool = False

    def matching(self, module: str, usual: bool) -> str | None:
        """The pattern that the end of a module's name matches; None if no pattern does. usual: whether the module is a
        linear layer that ALL_LINEAR includes."""
        if usual and (not self.targets or ALL_LINEAR in self.targets):
            return ALL_LINEAR
        return next((p for p in self.targets if fnmatchcase(module, p) or fnmatchcase(module, f"*.{p}")), None)


def read_adapter_slots(text: str) -> AdapterSlots:
    """Parse 8x16, 8x16+dora, or 8x16:q_proj,v_proj. UsageError for any other text."""
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})(\+dora)?(?::([^:]+))?", text)
    if found is None:
        raise UsageError(
            f"--adapters {text!r} is not SLOTSxRANK[+dora][:TARGETS]",
            "give 8x16, or 8x16:q_proj,v_proj for some layers",
        )
    count, rank = int(found[1]), int(found[2])
    if not 1 <= count <= MAX_SLOTS or not 1 <= rank <= MAX_RANK:
        raise UsageError(f"--adapters {text}: slots go from 1 to {MAX_SLOTS}, ranks from 1 to {MAX_RANK}")
    targets = tuple(part.strip() for part in re.split("[,+]", found[4] or "") if part.strip())
    return AdapterSlots(count, -(-rank // 16) * 16, targets, found[3] is not None)
