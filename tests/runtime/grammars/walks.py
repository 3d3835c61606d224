"""Random walks: answers sampled from a grammar token by token, as a sampler would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from icc.runtime.grammars.constraints import GrammarConstraint, Grammars
from icc.runtime.grammars.sources import Schema, of_schema
from tokenizers import Tokenizer

SAMPLE = Path(__file__).parents[3] / "samples" / "pystd"


class Walker:
    """Walks with the tokenizer of the sample model."""

    def __init__(self) -> None:
        text = (SAMPLE / "tokenizer.json").read_text()
        self.tokenizer = Tokenizer.from_str(text)
        self.size = self.tokenizer.get_vocab_size()
        self.end = json.loads((SAMPLE / "config.json").read_text())["eos_token_id"]
        self.grammars = Grammars(text, self.size, [self.end])
        self._bias = np.zeros(self.size)  # prefers short answers
        for token in range(self.size):
            shown = self.tokenizer.decode([token])
            self._bias[token] = 4.0 * (shown[:1] in ('"', "}", "]")) - (len(shown) > 3)
        self._bias[self.end] = 8.0

    def compile(self, schema: Schema) -> Callable[[], GrammarConstraint]:
        return self.grammars.compile(of_schema(schema))

    def walk(self, constraint: GrammarConstraint, seed: int, most: int = 80) -> tuple[str, str]:
        """A random answer and why it ended: "stop", "length" (after `most` tokens), or "error" if no token may
        follow."""
        random = np.random.default_rng(seed)
        tokens: list[int] = []
        for _ in range(most):
            logits = self._bias + 2.0 * random.gumbel(size=self.size)
            token = self._sampled(constraint, logits)
            if token is None:
                return self.tokenizer.decode(tokens), "error"
            if token == self.end:
                return self.tokenizer.decode(tokens), "stop"
            tokens.append(token)
        return self.tokenizer.decode(tokens), "length"

    def _sampled(self, constraint: GrammarConstraint, logits: np.ndarray) -> int | None:
        for _ in range(2):
            chosen = np.where(constraint.allowed(), logits, -np.inf)
            token = int(chosen.argmax())
            if not np.isfinite(chosen[token]):
                return None
            if constraint.accept(token):
                return token
        raise AssertionError("a narrowed mask allowed what was not accepted")

    def takes(self, constraint: GrammarConstraint, value: Any) -> bool:
        """Whether this value is a possible answer."""
        return self.follows(constraint, json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    def follows(self, constraint: GrammarConstraint, text: str) -> bool:
        """Whether this text is a possible answer."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        return all(constraint.allowed()[token] and constraint.accept(token) for token in [*tokens, self.end])
