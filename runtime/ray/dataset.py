"""`icc.ray.map_batches`: the prompts of a Ray Dataset answered by engines on a cluster; an interrupted run can be
resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import RequestError, UsageError
from ..format.load import read_manifest
from ..options import LoadOptions
from ..requests.params import SamplingParams
from .library import import_ray
from .options import RayOptions
from .resources import replica_place
from .stored import RowAnswer, StoredAnswers, row_key

if TYPE_CHECKING:
    from ray.data import Dataset  # pyright: ignore[reportMissingImports]

    from ..llm import LLM


def map_batches(
    dataset: Dataset,
    engine: str | PathLike[str] | LoadOptions,
    *,
    params: SamplingParams | None = None,
    column: str = "prompt",
    output: str = "answer",
    keep: str | PathLike[str] | None = None,
    engines: int = 1,
    cpus: float | None = None,
    batch_size: int | None = None,
) -> Dataset:
    """The dataset with the answers to its prompts, computed when it is read, as with `Dataset.map_batches`.

    Args:
        dataset: has a column of prompts: texts, or lists of messages, each with `role` and `content`.
        engine: the engine's directory, at the same path on every machine; or how it is loaded.
        params: how all are sampled; by default as `generate` and `chat` do.
        column: of the prompts. output: of the answers; beside it come `{output}_finish_reason`, `{output}_tokens`, and
            `{output}_error`, which is "" where there is an answer. A prompt that is refused fails alone.
        keep: a directory that all machines share. A prompt whose answer by the same engine with the same `params` is
            there is not computed again; each batch is written as soon as it is answered.
        engines: how many run, each in an actor that Ray restarts if it ends. cpus: CPUs that Ray reserves for each.
        batch_size: rows that an engine gets at a time; by default four times its largest batch.

    Raises:
        MissingExtraError: Ray Serve is not installed; Ray Data has an extra of its own, `ray[data]`.
        UsageError: a number out of range. EngineFormatError: the engine cannot be read.
    """
    if engines < 1:
        raise UsageError(f"engines = {engines}: at least 1")
    load = engine if isinstance(engine, LoadOptions) else LoadOptions(engine)
    manifest = read_manifest(Path(load.path))
    place = replica_place(load, manifest, RayOptions(cpus=cpus))
    import_ray()
    import ray.data as data  # pyright: ignore[reportMissingImports]

    options = msgspec.json.decode(place.load.to_json())
    options["path"] = str(Path(load.path).absolute())
    given = {
        "load": options, "digest": manifest.digest, "params": params, "column": column, "output": output,
        "keep": None if keep is None else str(Path(keep).absolute()),
    }  # fmt: skip
    return dataset.map_batches(
        Answers,
        fn_constructor_kwargs=given,
        batch_size=batch_size or 4 * manifest.limits.max_batch_size,
        compute=data.ActorPoolStrategy(size=engines),
        udf_modifying_row_count=False,
        **place.actor,
    )


class Answers:
    """The actor of `map_batches`: an engine, and the answers of earlier runs. Arguments as for `map_batches`; load: the
    fields of LoadOptions; digest: of the engine that every machine must have."""

    def __init__(
        self,
        load: Mapping[str, Any],
        digest: str,
        params: SamplingParams | None,
        column: str,
        output: str,
        keep: str | None,
    ) -> None:
        from ..loading import open_llm
        from .same_engine import check_engine

        check_engine(Path(load["path"]), digest)
        self._llm, self._digest = open_llm(LoadOptions(**load)), digest
        self._params, self._column, self._output = params, column, output
        self._sampled = msgspec.json.encode(params)
        self._stored = StoredAnswers(None if keep is None else Path(keep))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a batch of rows, given by columns; returns the batch with the columns of the answers added."""
        if self._column not in batch:
            raise UsageError(f"the dataset has no column {self._column!r}", f"it has {', '.join(map(repr, batch))}")
        prompts = [plain(value) for value in batch[self._column]]
        keys = [row_key(self._digest, self._sampled, prompt) for prompt in prompts]
        missing = dict.fromkeys(key for key in keys if self._stored.get(key) is None)
        asked = [prompts[keys.index(key)] for key in missing]
        new = dict(zip(missing, answered(self._llm, asked, self._params), strict=True))
        self._stored.put(new.items())
        found = [new.get(key) or self._stored.get(key) for key in keys]
        return {**batch, **columns(self._output, found)}


def plain(value: Any) -> Any:
    """A prompt of a batch as a text or a list of messages; Arrow gives a list as an array, and missing fields as
    None."""
    if isinstance(value, str):
        return value
    messages = [{name: field for name, field in dict(one).items() if field is not None} for one in value]
    return messages


def answered(llm: LLM, prompts: Sequence[Any], params: SamplingParams | None) -> list[RowAnswer]:
    """The answers of prompts; a refused prompt gets an error and does not affect the others. params: None for the
    engine's defaults."""
    if not prompts:
        return []
    try:
        chats = [one for one in prompts if not isinstance(one, str)]
        texts = [one for one in prompts if isinstance(one, str)]
        found = iter(llm.generate(texts, params) if texts else ())
        said = iter(llm.chat(chats, params) if chats else ())
        done = [next(found) if isinstance(one, str) else next(said) for one in prompts]
        return [RowAnswer(one.text, one.finish_reason, len(one.token_ids)) for one in done]
    except RequestError as error:
        if len(prompts) == 1:
            return [RowAnswer("", "error", 0, error.message)]
        return [answer for one in prompts for answer in answered(llm, [one], params)]


def columns(output: str, answers: Sequence[RowAnswer | None]) -> dict[str, Any]:
    """The answers as columns of the dataset. output: the name of the first."""
    found = [one for one in answers if one is not None]
    return {
        output: [one.text for one in found],
        f"{output}_finish_reason": [one.finish_reason for one in found],
        f"{output}_tokens": [one.tokens for one in found],
        f"{output}_error": [one.error for one in found],
    }
