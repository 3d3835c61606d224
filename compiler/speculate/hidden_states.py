"""The training data of heads: windows of tokens with the frozen model's hidden states, computed once and stored in
chunks.

The hidden state is the input of the LM head, the same value that the pass `insert-medusa-heads` reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..calibration import read_text, tokenize
from ..errors import UsageError
from .train_options import CHUNK

Progress = Callable[[str, int, int], None]
Read = Callable[[Any, Tensor], Tensor]  # (model, windows [n, length]) -> values to store, [n, length, width]


@dataclass(frozen=True)
class WindowOptions:
    """How windows are cut from the text.

    sequences: the largest number of windows, spread evenly. length: tokens per window. prompt: number of tokens of the
    text after which the model writes the rest of a window itself; 0 keeps the text. temperature: of the model's own
    text; 0 is greedy.
    """

    sequences: int
    length: int
    prompt: int
    temperature: float
    seed: int


def cut_windows(model_dir: Path, text: Path, bos: int | None, options: WindowOptions) -> Tensor:
    """Windows of the text, int64 [n, length], in a random order by the seed; each starts with `bos`, unless that is
    None. UsageError without a tokenizer.json, or for a text of fewer than two windows."""
    tokenizer = model_dir / "tokenizer.json"
    if not tokenizer.is_file():
        raise UsageError(f"{model_dir} has no tokenizer.json, so {text} cannot be read as tokens")
    ids = torch.tensor(tokenize(read_text(text), tokenizer), dtype=torch.int64)
    take = options.length - (bos is not None)
    count = min(options.sequences, len(ids) // take)
    if count < 2:
        raise UsageError(f"{text} is too short: {len(ids)} tokens, two windows need {2 * take}", "give a longer text")
    starts = torch.linspace(0, len(ids) - take, count).to(torch.int64)
    windows = ids[starts[:, None] + torch.arange(take)]
    if bos is not None:
        windows = torch.cat([torch.full((count, 1), bos), windows], dim=1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(options.seed))
    return windows[order]


class HiddenStates:
    """The chunks on disk: chunk c holds `tokens` int32 [n, length] and `hidden` bf16 [n, length, width], the result of
    `read`.

    An existing chunk is not computed again, and each depends only on the seed and its number, so an interrupted run
    continues where it stopped. Another model, text or option uses another directory.
    """

    def __init__(self, directory: Path, model: Any, windows: Tensor, options: WindowOptions, read: Read) -> None:
        said = [asdict(options), model.config.to_json_string(), getattr(read, "__name__", "")]
        facts = json.dumps(said, sort_keys=True).encode()
        digest = hashlib.sha256(facts + windows.numpy().tobytes()).hexdigest()[:16]
        self.directory = directory / f"hidden-{digest}"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.count = -(-len(windows) // CHUNK)
        self._model, self._windows, self._options, self._read = model, windows, options, read

    def fill(self, progress: Progress) -> None:
        """Compute the chunks that are missing."""
        for number in range(self.count):
            progress("hidden states of the text" if not self._options.prompt else "own text", number, self.count)
            path = self._path(number)
            if path.is_file():
                continue
            windows = self._windows[number * CHUNK : (number + 1) * CHUNK].to(self._model.device)
            if self._options.prompt:
                torch.manual_seed(self._options.seed * 1_000_003 + number)
                windows = continued(self._model, windows[:, : self._options.prompt], self._options)
            hidden = self._read(self._model, windows)
            partial = path.with_suffix(".partial")
            save_file({"tokens": windows.cpu().to(torch.int32), "hidden": hidden.cpu().to(torch.bfloat16)}, partial)
            partial.replace(path)

    def chunk(self, number: int) -> tuple[Tensor, Tensor]:
        """(tokens int64 [n, length], hidden bf16 [n, length, width])."""
        found = load_file(self._path(number))
        return found["tokens"].to(torch.int64), found["hidden"]

    def batches(self, numbers: range, rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of `rows` windows over the chunks `numbers`, in a random order by the seed; shapes as in `chunk`."""
        source = torch.Generator().manual_seed(seed)
        for index in torch.randperm(len(numbers), generator=source).tolist():
            tokens, hidden = self.chunk(numbers[index])
            order = torch.randperm(len(tokens), generator=source)
            for start in range(0, len(tokens) - len(tokens) % rows or len(tokens), rows):
                picked = order[start : start + rows]
                yield tokens[picked], hidden[picked]

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:05d}.safetensors"


@torch.inference_mode()
def hidden_states(model: Any, windows: Tensor) -> Tensor:
    """The inputs of the model's LM head on `windows` [n, length]: [n, length, hidden]."""
    caught: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    try:
        model(input_ids=windows, use_cache=False)
    finally:
        hook.remove()
    return caught[0]


def taps_of(layers: int) -> tuple[int, ...]:
    """The numbers of layers after which EAGLE-3 reads hidden states: SpecForge's choice, or equally spread ones in
    models of fewer than 6 layers."""
    return (2, layers // 2, layers - 3) if layers >= 6 else tuple(sorted({1, layers // 2, layers - 1} - {0}))


@torch.inference_mode()
def tapped_states(model: Any, windows: Tensor) -> Tensor:
    """The hidden states after the layers of `taps_of`, before the next norm, for `windows` [n, length]: [n, length,
    taps * hidden]."""
    taps = taps_of(model.config.get_text_config().num_hidden_layers)
    found = model.get_decoder()(input_ids=windows, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([found[tap] for tap in taps], dim=-1)


@torch.inference_mode()
def continued(model: Any, prompts: Tensor, options: WindowOptions) -> Tensor:
    """`prompts` [n, p] continued by the model to [n, length]. End tokens do not end the text."""
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature:
        sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    count = options.length - prompts.shape[1]
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        **sampling,
    )
