"""Which tokens attention gives up before a sequence ends (`--kv-policy`): memory is bounded, and something is lost.

streaming  the first tokens and a window of the last, at distances as if nothing lay between (StreamingLLM: Xiao et al.
           2023, arXiv 2309.17453)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import UsageError

ALL = "all"
LEAST = 32  # tokens: what is kept of less is no text
# the sizes of a policy, in tokens, and what they are if they are not given
SIZES: Mapping[str, Mapping[str, int]] = {"streaming": {"sinks": 4, "window": 1020}}
EXPLAINED = {
    ALL: "everything: what the model does",
    "streaming[:sinks=4,window=1020]": "lossy: the first tokens and the last, for texts of any length",
}


@dataclass(frozen=True)
class Eviction:
    """A policy by name and its sizes, in the order of SIZES."""

    kind: str
    sizes: tuple[int, ...]

    def __getitem__(self, name: str) -> int:
        return self.sizes[list(SIZES[self.kind]).index(name)]

    @property
    def tokens(self) -> int:
        """The most tokens of a sequence that a layer holds for its next one, that itself included."""
        return self["sinks"] + self["window"]

    @property
    def endless(self) -> bool:
        """Whether no distance is ever larger than `tokens`: texts may be longer than the model was made for."""
        return self.kind == "streaming"

    @property
    def loses(self) -> str:
        """What an engine that has it can no longer do."""
        return (
            f"each token sees the first {self['sinks']} tokens and the last {self['window']}, itself among them, and "
            "nothing of what lay between"
        )

    def __str__(self) -> str:
        pairs = zip(SIZES[self.kind], self.sizes, strict=True)
        return f"{self.kind}:" + ",".join(f"{name}={size}" for name, size in pairs)


def read_eviction(text: str) -> Eviction | None:
    """The policy that --kv-policy says; None for ALL. UsageError where there is no such policy, name or size."""
    kind, _, rest = text.partition(":")
    if kind == ALL and not rest:
        return None
    if kind not in SIZES:
        raise UsageError(f"--kv-policy {text!r} is unknown", f"choose from: {', '.join(EXPLAINED)}")
    sizes = dict(SIZES[kind])
    for item in filter(None, rest.split(",")):
        found = re.fullmatch(r"(\w+)=(\d+)", item.strip())
        if found is None or found[1] not in sizes:
            raise UsageError(
                f"--kv-policy {text}: {item!r} is no size of {kind}",
                f"write {kind}:" + ",".join(f"{name}={size}" for name, size in SIZES[kind].items()),
            )
        sizes[found[1]] = int(found[2])
    return _checked(Eviction(kind, tuple(sizes.values())))


def _checked(policy: Eviction) -> Eviction:
    if policy["sinks"] < 1 or policy["window"] < LEAST:
        raise UsageError(f"--kv-policy {policy}: at least one sink and a window of {LEAST} tokens are needed")
    return policy
