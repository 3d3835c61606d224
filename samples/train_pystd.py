"""Train the sample checkpoint `samples/pystd`: a small Llama on the source of the Python standard library.

Run it as `python samples/train_pystd.py --minutes 40`, or with `--steps`, for a result that does not depend on the
speed of the machine. With `--state FILE` a training that was cut off goes on where it last saved.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pystd_corpus import (
    BOS_ID,
    STDLIB,
    VOCAB_SIZE,
    Corpus,
    passes,
    read_corpus,
    save_texts,
    save_tokenizer,
    train_tokenizer,
)
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

# Most of the training sees short windows, which are cheap; the last part teaches the whole context.
CONTEXT = 1024
SHORT = 256
LONG_FROM = 0.8
BATCH_TOKENS = 8192
PEAK_LR = 6e-3
WARMUP = 0.03
SAVE_MINUTES = 8.0


@dataclass(frozen=True)
class Run:
    """One training: how long (in steps where given, else in minutes of wall clock), and where it is kept."""

    out: Path
    minutes: float
    steps: int | None = None
    seed: int = 0
    state: Path | None = None

    def progress(self, step: int, minutes: float) -> float:
        """The share of the training that is over."""
        return minutes / self.minutes if self.steps is None else step / self.steps


def batches(texts_of_passes: Iterator[list[str]], tokenizer: Tokenizer, length: int) -> Iterator[torch.Tensor]:
    """Token windows `[rows, length + 1]`: every row reads on through its own part of the pass."""
    rows = BATCH_TOKENS // length
    for texts in texts_of_passes:
        encoded = tokenizer.encode_batch_fast(texts)
        tokens = torch.tensor([token for document in encoded for token in document.ids])
        streams = tokens[: len(tokens) // rows * rows].view(rows, -1)
        for start in range(0, streams.shape[1] - length, length):
            yield streams[:, start : start + length + 1]


def build_model() -> LlamaForCausalLM:
    """An untrained Llama of 5.6 M parameters; every matrix has a multiple of 128 input features."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=6,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=BOS_ID,
    )
    return LlamaForCausalLM(config)


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=PEAK_LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def learning_rate(progress: float) -> float:
    """The learning rate at `progress` in [0, 1]: a short warmup, then a cosine to zero."""
    return PEAK_LR * min(1.0, progress / WARMUP) * 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """A model in training, with its optimizers and how far it is."""

    def __init__(self, run: Run) -> None:
        """Start from scratch, or from the state that an earlier run left."""
        self.run = run
        self.model = build_model()
        self.model.set_attn_implementation("eager")  # compiled, it is faster on a CPU than flash attention
        self.optims = optimizers(self.model)
        self.step, self.minutes = 0, 0.0
        if run.state and run.state.exists():
            state = torch.load(run.state, weights_only=True)
            self.step, self.minutes = state["step"], state["minutes"]
            self.model.load_state_dict(state["model"])
            for optim, saved in zip(self.optims, state["optims"], strict=True):
                optim.load_state_dict(saved)

    @torch.compile(dynamic=False)
    def loss(self, window: torch.Tensor) -> torch.Tensor:
        """The mean loss in nats per token of `[rows, length + 1]` tokens."""
        logits = self.model(input_ids=window[:, :-1], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())

    def update(self, window: torch.Tensor, rate: float) -> float:
        """Take one step; returns the loss before it."""
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optim in self.optims:
            for group in optim.param_groups:
                group["lr"] = rate
            optim.step()
            optim.zero_grad()
        self.step += 1
        return loss.item()

    def save(self) -> None:
        """Write the checkpoint in bf16, and the state to go on from."""
        copy = build_model()
        copy.load_state_dict(self.model.state_dict())
        sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
        copy.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=BOS_ID, **sampling)
        copy.bfloat16().save_pretrained(self.run.out)
        if self.run.state:
            state = {"step": self.step, "minutes": self.minutes, "model": self.model.state_dict()}
            torch.save(state | {"optims": [optim.state_dict() for optim in self.optims]}, self.run.state)


def train(corpus: Corpus, tokenizer: Tokenizer, run: Run) -> None:
    """Train to the end of the schedule, saving now and then."""
    trainer = Trainer(run)
    texts = passes(corpus, random.Random(run.seed + trainer.step))
    short, long = batches(texts, tokenizer, SHORT), batches(texts, tokenizer, CONTEXT)
    mean, saved, start = 0.0, trainer.minutes, time.monotonic() - 60 * trainer.minutes
    for count in itertools.count(1):
        progress = run.progress(trainer.step, trainer.minutes)
        if progress >= 1:
            break
        loss = trainer.update(next(short if progress < LONG_FROM else long), learning_rate(progress))
        trainer.minutes = (time.monotonic() - start) / 60
        mean += (loss - mean) * max(0.02, 1 / count)
        if trainer.step % 20 == 0:
            tokens = trainer.step * BATCH_TOKENS / 1e6
            print(f"{progress:.1%}  {trainer.minutes:.1f} min  {tokens:.2f} M tokens  loss {mean:.3f}", flush=True)
        if trainer.minutes > saved + SAVE_MINUTES:
            trainer.save()
            saved = trainer.minutes
    trainer.save()


def main() -> None:
    """Parse the command line, train, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pystd", help="checkpoint directory")
    parser.add_argument("--minutes", type=float, default=40.0, help="length of the training")
    parser.add_argument("--steps", type=int, help="length in steps, instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="file to go on from, if it exists, and to save to")
    run = Run(**vars(parser.parse_args()))

    torch.manual_seed(run.seed)
    corpus = read_corpus(STDLIB)
    print(f"files: {len(corpus.library)} library, {len(corpus.tests)} tests, {len(corpus.heldout)} held out")
    tokenizer = train_tokenizer(list(corpus.library.values()))
    save_texts(run.out, corpus, run.seed)
    save_tokenizer(run.out, tokenizer, CONTEXT)
    train(corpus, tokenizer, run)


if __name__ == "__main__":
    main()
