"""OwnEngine: the engine in `python ENGINE COMMAND`, whose commands and options are those that it can do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click

from ..errors import IccError, MissingExtraError, RequestError, install


@dataclass(frozen=True)
class OwnEngine:
    """path: the engine directory. lacks: what it cannot do, of "generate", "cpu", "gpu", "tokenizer" and "server"."""

    path: str
    lacks: frozenset[str]

    @classmethod
    def read(cls, path: str) -> OwnEngine:
        """From engine.json as it stands. One that cannot be read lacks nothing that it could have: the command that is
        run says what is wrong with it."""
        lacks = {"server"}
        try:
            found = json.loads((Path(path) / "engine.json").read_bytes())
            lacks.add("gpu" if found["backend"] == "cpu" else "cpu")
            lacks |= {"generate"} if "embedding" in found else set()
            lacks |= {"tokenizer"} if found.get("tokenizer_dir") is None else set()
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return cls(path, frozenset(lacks))

    def can(self, needs: str) -> bool:
        """Whether it has all of these, which are separated by spaces."""
        return self.lacks.isdisjoint(needs.split())

    def refusal(self, command: str, needs: str) -> IccError:
        """Why it has no such command."""
        if needs == "server":
            return MissingExtraError(
                f"an engine's own runtime has no {command}", f"{install('serve')}; icc {command} {self.path}"
            )
        reason = "was compiled for embeddings" if "generate" in self.lacks else "has no tokenizer"
        return RequestError(f"the engine {reason}: it has no {command}")


def own_engine(context: click.Context) -> OwnEngine | None:
    """The engine that a command line belongs to; None for `icc`, which takes any."""
    return context.find_object(OwnEngine)
