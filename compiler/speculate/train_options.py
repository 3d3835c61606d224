"""What `icc train-heads` is asked for; read before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...runtime.settings import setting
from ..errors import UsageError

EAGLE = "eagle3"
KINDS = {"medusa": "heads on the last hidden state", EAGLE: "a layer over three of the hidden states"}
MAX_HEADS, MAX_LAYERS = 16, 8
CHUNK = 64  # windows per chunk of hidden states, which is also the batch of the model


@dataclass(frozen=True)
class TrainHeadsOptions:
    """What to train, on what, and for how long.

    kind: Medusa heads, or an EAGLE-3 drafter, which is one layer: `heads` is then how many tokens it guesses in a chain
    while it is trained, and layers and own_lm_head have no meaning.
    own_lm_head: every head learns an LM head of its own, as in the published checkpoints; otherwise all share the
    model's behind a projection of their own, and the file is small. generate: the model writes all but the first
    quarter of each window itself, at `temperature`. rate: the peak learning rate. One window in twenty is held out.
    """

    model: Path
    text: Path
    output: Path
    kind: str = setting("medusa", "What to train.", values=lambda: KINDS)
    heads: int = setting(4, "Tokens guessed beyond the next one.")
    layers: int = setting(1, "Residual blocks of each head.")
    own_lm_head: bool = setting(False, "An LM head per head; otherwise all share the model's.")
    generate: bool = setting(False, "Train on the model's own continuations of the text.")
    temperature: float = setting(0.0, "Of that writing; 0 is greedy.")
    sequences: int = setting(4096, "Windows of the text, at most.")
    length: int = setting(256, "Tokens of a window.")
    epochs: int = setting(1, "Times that the text is read.")
    batch: int = setting(8, "Windows per step.")
    rate: float = setting(2e-3, "Peak learning rate.")
    seed: int = setting(0, "Seed of all random choices.")
    device: str = setting("cpu", "Where torch runs: cpu or cuda.")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"--kind {self.kind!r} is unknown", f"give {' or '.join(KINDS)}")
        if self.kind == EAGLE and (self.layers != 1 or self.own_lm_head):
            raise UsageError("--layers and --own-lm-head are of --kind medusa: an EAGLE-3 drafter is one layer")
        for name, least, most in (
            ("heads", 1, MAX_HEADS),
            ("layers", 1, MAX_LAYERS),
            ("sequences", 2, 1 << 24),
            ("epochs", 1, 1 << 20),
            ("batch", 1, CHUNK),
            ("length", self.heads + 8, 1 << 20),
        ):
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"--{name} must be from {least} to {most}, not {getattr(self, name)}")
