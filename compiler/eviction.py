"""Which tokens the KV cache drops before a sequence ends (`--kv-policy`): this bounds memory and loses information.

streaming  keeps the first tokens and a window of the last, with positions as if adjacent (StreamingLLM: Xiao et al.
           2023, arXiv 2309.17453)
h2o        at `budget` tokens an eighth of them is dropped: per KV head those that got the least attention
           so far, none of the `recent` last (H2O: Zhang et al. 2023, arXiv 2306.14048; that many at once as
           ScissorHands: Liu et al. 2023, arXiv 2305.17118)
snapkv     after a prompt was read, every KV head keeps `budget` of its tokens: the last `recent`, and those to which
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
LEAST = 32  # tokens: fewer do not make a usable text
# the sizes of a policy, in tokens, with their defaults: how many it keeps, and how many of the first or last always
SIZES: Mapping[Kind, Mapping[str, int]] = {
    "streaming": {"sinks": 4, "window": 1020},
    "h2o": {"budget": 1024, "recent": 256},
    "snapkv": {"budget": 1024, "recent": 32},
}
EXPLAINED = {
    ALL: "keep everything, as the model does",
    "streaming[:sinks=4,window=1020]": "lossy: keep the first tokens and the last, for texts of any length",
    "h2o[:budget=1024,recent=256]": "lossy: keep the tokens that got the most attention so far (CPUs)",
    "snapkv[:budget=1024,recent=32]": "lossy: keep the prompt's tokens that its end attends to (CPUs)",
}


@dataclass(frozen=True)
class Eviction(ConstantArgument):
    """A policy. size: tokens of the window or budget. beside: tokens that are always kept: the first ones, in addition
    to the window (streaming), or the last ones of the budget."""

    kind: Kind
    size: int
    beside: int

    @property
    def tokens(self) -> int:
        """The most tokens of a sequence that a layer holds; for "snapkv" the most of its prompt, after the prompt was
        read."""
        return self.size + self.beside if self.kind == "streaming" else self.size

    @property
    def endless(self) -> bool:
        """Whether no distance ever exceeds `tokens`, so that texts may be longer than the model was trained for."""
        return self.kind == "streaming"

    @property
    def chooses(self) -> bool:
        """Whether the choice of kept tokens depends on attention, and differs between heads."""
        return self.kind != "streaming"

    @property
    def loses(self) -> str:
        """What an engine with this policy can no longer do, in words."""
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
    """The policy that --kv-policy names; None for ALL. UsageError for an unknown policy, name or size."""
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
