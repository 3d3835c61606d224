"""The options of `icc train-heads`, parsed before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...runtime.settings import setting
from ..errors import UsageError

MEDUSA, EAGLE, UNO = "medusa", "eagle3", "uno"
KINDS = {
    MEDUSA: "heads on the last hidden state",
    EAGLE: "a layer over three of the hidden states",
    UNO: "an adapter with which the model guesses in random tokens' places",
}
MAX_HEADS, MAX_LAYERS, MAX_RANK = 16, 8, 256
CHUNK = 64  # windows per chunk of hidden states, and the model's batch size


@dataclass(frozen=True)
class TrainHeadsOptions:
    """Options of a training.

    kind: Medusa heads; an EAGLE-3 drafter, which is one layer; or an adapter (LoRA) for UNO. `heads` is then the number
    of tokens that it guesses during training, and layers and own_lm_head are not used. rank: of an adapter for UNO.
    own_lm_head: every head learns its own LM head, as in the published checkpoints; otherwise all share the model's LM
    head, each after its own projection, and the file is small. generate: the model writes all but the first quarter of
    each window itself, at `temperature`. rate: the peak learning rate. One window in twenty is held out.
    """

    model: Path
    text: Path
    output: Path
    kind: str = setting(MEDUSA, "What to train.", values=lambda: KINDS)
    heads: int = setting(4, "Tokens guessed beyond the next one.")
    layers: int = setting(1, "Residual blocks of each head.")
    own_lm_head: bool = setting(False, "An LM head per head; otherwise all share the model's.")
    rank: int = setting(16, "Rank of an adapter.")
    generate: bool = setting(False, "Train on the model's own continuations of the text.")
    temperature: float = setting(0.0, "Temperature of the continuations; 0 is greedy.")
    sequences: int = setting(4096, "Most windows that are cut from the text.")
    length: int = setting(256, "Tokens of a window.")
    epochs: int = setting(1, "Passes over the text.")
    batch: int = setting(8, "Windows per step.")
    rate: float = setting(2e-3, "Peak learning rate.")
    seed: int = setting(0, "Seed of all random choices.")
    device: str = setting("cpu", "Device for torch: cpu or cuda.")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"--kind {self.kind!r} is unknown", f"give {' or '.join(KINDS)}")
        if self.kind != MEDUSA and (self.layers != 1 or self.own_lm_head):
            raise UsageError("--layers and --own-lm-head are of --kind medusa: no other kind has heads")
        for name, least, most in (
            ("heads", 1, MAX_HEADS),
            ("layers", 1, MAX_LAYERS),
            ("rank", 1, MAX_RANK),
            ("sequences", 2, 1 << 24),
            ("epochs", 1, 1 << 20),
            ("batch", 1, CHUNK),
            ("length", self.heads + 8, 1 << 20),
        ):
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"--{name} must be from {least} to {most}, not {getattr(self, name)}")
