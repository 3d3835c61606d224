"""Which tokens attention gives up before a sequence ends (`--kv-policy`): memory is bounded, and something is lost.

streaming  the first tokens and a window of the last, at distances as if nothing lay between (StreamingLLM: Xiao et al.
           2023, arXiv 2309.17453)
h2o        when there are `budget` tokens, an eighth of them goes: of every KV head those that got the least attention
           so far, none of the `recent` last (H2O: Zhang et al. 2023, arXiv 2306.14048; that many at once as
           ScissorHands: Liu et al. 2023, arXiv 2305.17118)
snapkv     of a prompt that has been read, every KV head keeps `budget` tokens: the last `recent`, and those to which
           they gave the most attention, with their neighbours (SnapKV: Li et al. 2024, arXiv 2404.14469); and all of
           the answer
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .constant_argument import ConstantArgument
from .errors import UsageError

Kind = Literal["streaming", "h2o", "snapkv"]
ALL = "all"
LEAST = 32  # tokens: what is kept of less is no text
# the sizes of a policy, in tokens, and what they are if they are not given: how many it keeps, and of these in any case
SIZES: Mapping[Kind, Mapping[str, int]] = {
    "streaming": {"sinks": 4, "window": 1020},
    "h2o": {"budget": 1024, "recent": 256},
    "snapkv": {"budget": 1024, "recent": 32},
}
EXPLAINED = {
    ALL: "everything: what the model does",
    "streaming[:sinks=4,window=1020]": "lossy: the first tokens and the last, for texts of any length",
    "h2o[:budget=1024,recent=256]": "lossy: what got the most attention so far (CPUs)",
    "snapkv[:budget=1024,recent=32]": "lossy: of the prompt, what its end looks at (CPUs)",
}


@dataclass(frozen=True)
class Eviction(ConstantArgument):
    """A policy: tokens of a window or budget, and beside them the first ones (streaming), or of them the last ones,
    that are kept in any case."""

    kind: Kind
    size: int
    beside: int

    @property
    def tokens(self) -> int:
        """The most tokens of a sequence that a layer holds; of "snapkv", of its prompt once that has been read."""
        return self.size + self.beside if self.kind == "streaming" else self.size

    @property
    def endless(self) -> bool:
        """Whether no distance is ever larger than `tokens`: texts may be longer than the model was made for."""
        return self.kind == "streaming"

    @property
    def chooses(self) -> bool:
        """Whether what is kept depends on attention, and differs between heads."""
        return self.kind != "streaming"

    @property
    def loses(self) -> str:
        """What an engine that has it can no longer do."""
        if self.kind == "streaming":
            return (
                f"each token sees the first {self.beside} tokens and the last {self.size}, itself among them, and "
                "nothing of what lay between"
            )
        if self.kind == "h2o":
            return (
                f"at {self.size} tokens, every head forgets the {self.size // 8} that got the least attention so far, "
                f"none of the last {self.beside}"
            )
        return (
            f"of a longer prompt every head remembers {self.size} tokens, the last {self.beside} and what these look at"
        )

    def __str__(self) -> str:
        values = {"sinks": self.beside, "recent": self.beside, "window": self.size, "budget": self.size}
        return f"{self.kind}:" + ",".join(f"{name}={values[name]}" for name in SIZES[self.kind])


def read_eviction(text: str) -> Eviction | None:
    """The policy that --kv-policy says; None for ALL. UsageError where there is no such policy, name or size."""
    name, _, rest = text.partition(":")
    if name == ALL and not rest:
        return None
    kinds: dict[str, Kind] = {kind: kind for kind in SIZES}
    kind = kinds.get(name)
    if kind is None:
        raise UsageError(f"--kv-policy {text!r} is unknown", f"choose from: {', '.join(EXPLAINED)}")
    sizes = dict(SIZES[kind])
    for item in filter(None, rest.split(",")):
        found = re.fullmatch(r"(\w+)=(\d{1,9})", item.strip())
        if found is None or found[1] not in sizes:
            raise UsageError(
                f"--kv-policy {text}: {item!r} is no size of {kind}",
                f"write {kind}:" + ",".join(f"{name}={size}" for name, size in SIZES[kind].items()),
            )
        sizes[found[1]] = int(found[2])
    return _checked(Eviction(kind, sizes.get("window") or sizes["budget"], sizes.get("sinks") or sizes["recent"]))


def _checked(policy: Eviction) -> Eviction:
    if policy.kind == "streaming":
        wrong = "at least one sink and a window of" if policy.beside < 1 or policy.size < LEAST else ""
        wrong += f" {LEAST} tokens are needed" if wrong else ""
    elif policy.size < 2 * LEAST:
        wrong = f"a budget of at least {2 * LEAST} tokens is needed"
    else:
        most = policy.size - policy.size // 8
        wrong = "" if 1 <= policy.beside <= most else f"of so many, 1 to {most} can be the recent ones"
    if wrong:
        raise UsageError(f"--kv-policy {policy}: {wrong}")
    return policy
