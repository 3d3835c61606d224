"""`icc compile --schema` and `--grammar`: lowers grammars of answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...runtime.errors import MissingExtraError, RequestError, install
from ...runtime.format.forms import CompiledForm
from ...runtime.grammars.compiling import lowered
from ...runtime.grammars.constraints import Grammars
from ...runtime.grammars.sources import of_lark, of_schema
from ...runtime.tokenizer import Tokenizer
from ..errors import UsageError
from ..prompt_files import FormFile

_ANY = of_lark('start: "a"')


def lower_forms(files: Sequence[FormFile]) -> list[CompiledForm]:
    """The lowered grammars in these files. UsageError for one that no answer can follow, or that exceeds the limits."""
    return [_lowered(file) for file in files]


def check_readable(file: FormFile, tokenizer: Path, vocab_size: int) -> None:
    """Raise UsageError if the tokens of a model, given its tokenizer.json, cannot follow any grammar. vocab_size: in
    tokens."""
    text = Tokenizer(tokenizer.read_bytes()).to_json()
    try:
        Grammars(text, vocab_size, [0]).compile(_ANY)  # which token ends an answer does not matter here
    except RequestError as error:
        raise UsageError(f"{file.option}: {error.message}", "leave it out") from error


def _lowered(file: FormFile) -> CompiledForm:
    try:
        asked = of_lark(file.text) if file.schema is None else of_schema(file.schema)
        return CompiledForm(file.path.name, file.kind, asked, lowered(asked))
    except RequestError as error:
        raise UsageError(f"{file.option}: {error.message}", error.hint) from error
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{file.option} needs {error.name}, which is not installed", install("structured")
        ) from error
