"""OwnEngine: the engine in `python ENGINE COMMAND`; only commands and options that it can carry out are offered."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec

from ..errors import IccError, MissingExtraError, RequestError, install
from ..format.container import Container
from ..format.open_container import open_container
from ..format.present import MANIFEST_FILE


class OwnEngine(msgspec.Struct, frozen=True):
    """An engine that runs by itself. path: of the engine. lacks: abilities that it does not have, a subset of
    "generate", "cpu", "gpu", "targets", "tokenizer", "template" and "server"."""

    path: str
    lacks: frozenset[str]

    @classmethod
    def read(cls, path: str) -> OwnEngine:
        """Read engine.json without validation. An engine that cannot be read lacks "server" alone: the command that
        runs then reports what is wrong with it."""
        lacks = {"server"}
        try:
            container = open_container(Path(path))
            found = json.loads(container.read(MANIFEST_FILE))
            if "targets" in found:  # targets differ only in what their devices decide
                each = [cls.read(f"{path}/{target}").lacks for target in found["targets"]]
                return cls(path, frozenset.intersection(*each) - {"targets"})
            lacks |= {"targets", "gpu" if found["backend"] == "cpu" else "cpu"}
            lacks |= {"generate"} if "embedding" in found else set()
            folder = found.get("tokenizer_dir")
            lacks |= {"tokenizer"} if folder is None else set()
            lacks |= set() if folder is not None and _has_template(container, f"{folder}/") else {"template"}
        except (OSError, ValueError, KeyError, TypeError, IccError):
            pass
        return cls(path, frozenset(lacks))

    def can(self, needs: str) -> bool:
        """Whether the engine has all abilities in `needs`, which are separated by spaces."""
        return self.lacks.isdisjoint(needs.split())

    def refusal(self, command: str, needs: str) -> IccError:
        """The error that says why the engine does not have this command."""
        if needs == "server":
            return MissingExtraError(
                f"an engine's own runtime has no {command}", f"{install('serve')}; icc {command} {self.path}"
            )
        reasons = {
            "generate": "was compiled for embeddings",
            "tokenizer": "has no tokenizer",
            "template": "has no chat template",
        }
        lacking = next(name for name in reasons if name in needs.split() and name in self.lacks)
        return RequestError(f"the engine {reasons[lacking]}: it has no {command}")


def _has_template(container: Container, start: str) -> bool:
    from ..templates.source import read_template

    there = [name.removeprefix(start) for name in container.sizes() if name.startswith(start)]

    def read(name: str) -> bytes | None:
        return container.read(start + name) if name in there else None

    return bool(read_template(read, [name for name in there if name.endswith(".jinja")]))


def own_engine(context: click.Context) -> OwnEngine | None:
    """The engine that a command line belongs to; None for `icc`, which works with any engine."""
    return context.find_object(OwnEngine)
