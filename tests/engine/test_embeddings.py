"""Engines compiled with --task embed: vectors equal to those computed from transformers' hidden states."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from icc.compiler.errors import CheckpointError, UnsupportedModel
from icc.compiler.frontend.source.pooling import Pooling, read_pooling
from icc.runtime.errors import RequestError, UsageError
from icc.runtime.requests.request import Standing

from .conftest import Compiled

LENGTHS = (1, 2, 7, 16, 17, 33, 5)
SENTENCE = "sentence_transformers.models."


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 119, length).tolist() for length in lengths]


def expected(oracle: Any, prompts: list[list[int]], pooling: str, normalize: bool) -> np.ndarray:
    """The vectors [prompts, H] pooled in float32 from transformers' hidden states after the last norm."""
    import torch

    rows = []
    for prompt in prompts:
        with torch.no_grad():
            hidden = oracle.base_model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        weights = torch.arange(1.0, len(hidden) + 1)[:, None]
        row = {
            "last": hidden[-1],
            "mean": hidden.mean(0),
            "cls": hidden[0],
            "max": hidden.max(0).values,
            "weightedmean": (hidden * weights).sum(0) / weights.sum(),
            "mean_sqrt_len": hidden.sum(0) / len(hidden) ** 0.5,
        }[pooling]
        rows.append(torch.nn.functional.normalize(row, dim=0) if normalize else row)
    return torch.stack(rows).numpy()


def write_modules(path: Path, pooling: str, *more: str) -> None:
    """Write the files that sentence-transformers adds to a checkpoint."""
    names = ["Transformer", "Pooling", *more]
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": SENTENCE + name}
        for i, name in enumerate(names)
    ]
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "1_Pooling").mkdir(exist_ok=True)
    modes = {
        f"pooling_mode_{mode}": mode == pooling
        for mode in ("cls_token", "mean_tokens", "max_tokens", "lasttoken", "median")
    }
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))


@pytest.fixture(scope="session")
def embedder(compiled: Callable[..., Compiled], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Compiled]:
    """embedder(name, headless, **options): an engine that embeds; headless: its checkpoint has no LM head."""
    known: dict[Any, Compiled] = {}

    def get(name: str, headless: bool = False, **options: Any) -> Compiled:
        key = (name, headless, *sorted(options.items()))
        if key not in known:
            source = compiled(name)
            checkpoint = source.checkpoint
            if headless:
                checkpoint = tmp_path_factory.mktemp("headless")
                source.oracle.base_model.save_pretrained(checkpoint)
            engine = tmp_path_factory.mktemp("engine") / f"{name}.engine"
            limits = {"max_step_tokens": 16, "max_batch_size": 4}
            engine = icc.compile(checkpoint, engine, target="native", task="embed", **limits, **options)
            known[key] = Compiled(engine, checkpoint, source.oracle)
        return known[key]

    return get


def pooled(engine: Path, to: Path, pooling: str, normalize: bool) -> Path:
    """A copy of the engine in `to` with another pooling, as a compile would have written it."""
    from icc.runtime.format.digest import encode_sealed
    from icc.runtime.format.load import read_manifest
    from msgspec.structs import replace

    shutil.copytree(engine, to)
    manifest = read_manifest(to)
    assert manifest.embedding is not None
    facts = replace(manifest.embedding, pooling=pooling, normalize=normalize)
    (to / "engine.json").write_bytes(encode_sealed(replace(manifest, embedding=facts)))
    return to


@pytest.mark.parametrize(
    ("pooling", "normalize"),
    [
        *((pooling, normalize) for pooling in ("last", "mean", "cls") for normalize in (True, False)),
        *((pooling, False) for pooling in ("max", "weightedmean", "mean_sqrt_len")),
    ],
)
def test_equal_to_transformers(
    pooling: str, normalize: bool, embedder: Callable[..., Compiled], tmp_path: Path
) -> None:
    """Prompts of odd lengths, more than a batch, longer than a step; alone and together, and again from the prefix
    cache."""
    source = embedder("llama", headless=True)
    engine = pooled(source.engine, tmp_path / "x.engine", pooling, normalize)
    prompts = prompts_of()
    wanted = expected(source.oracle, prompts, pooling, normalize)
    with icc.load(engine, threads=1) as llm:
        found = llm.embed(prompts)
        assert found.dtype == np.float32 and found.shape == (len(prompts), 64)
        np.testing.assert_allclose(found, wanted, atol=3e-5 * np.abs(wanted).max())
        again = llm.embed(prompts[::-1])[::-1]
        assert (again == found).all(), "batch-mates, chunks and cached prefixes change no bit"
        assert all((llm.embed([prompt])[0] == row).all() for prompt, row in zip(prompts, found, strict=True))
        assert llm.embed([]).shape == (0, 64)
        assert llm.loop.scheduler.kv.is_idle


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_other_shapes_with_a_head_in_the_checkpoint(name: str, tiny: Any, tmp_path: Path) -> None:
    """The head is left out, whatever the model's last layers look like; no other matrix is taken for a head and kept
    wider."""
    from icc.compiler.frontend.load import load_graph
    from icc.compiler.graph.interpret import interpret
    from icc.passes import pipelines
    from icc.passes.base import PassContext
    from icc.passes.manager import run_passes
    from icc.passes.quantize.select import lm_heads

    oracle = tiny.save_tiny(tiny.tiny_configs()[name], tmp_path)
    graph = load_graph(tmp_path, task="embed")
    run_passes(graph, pipelines.canonicalize(), PassContext())
    assert not lm_heads(graph)
    run_passes(graph, [*pipelines.attention(), *pipelines.fuse()], PassContext())
    [prompt] = prompts_of((20,))
    found = interpret(graph, prompt, [0, 19]).numpy()
    wanted = np.concatenate([expected(oracle, [prompt], pooling, False) for pooling in ("cls", "last")])
    np.testing.assert_allclose(found, wanted, atol=3e-5 * np.abs(wanted).max())


def test_only_the_prefix_of_the_same_salt_is_shared(embedder: Callable[..., Compiled]) -> None:
    source = embedder("llama", headless=True)
    prompt = prompts_of((40,))[0]
    with icc.load(source.engine, threads=1) as llm:

        def cached(salt: bytes) -> int | None:
            embedding = llm.loop.add_embedding(prompt, 0, Standing(salt=salt))
            while not embedding.complete:
                llm.loop.step()
                embedding.advance()
            llm.loop.end(embedding.scores)
            return embedding.scores.num_cached_tokens

        assert [cached(b"a"), cached(b"b")] == [0, 0] and (cached(b"a") or 0) > 0


def test_hidden_states_that_are_no_numbers_end_the_request(embedder: Callable[..., Compiled]) -> None:
    source = embedder("llama", headless=True)
    good, bad = prompts_of((9, 9))
    with icc.load(source.engine, threads=1) as llm:
        fine = llm.embed([good])
        step = llm.executor.step

        def poisoned(batch: Any) -> np.ndarray:
            rows = step(batch)
            rows[[i for i, s in enumerate(batch.sequences) if s.token_ids[0] == bad[0]]] = np.nan
            return rows

        llm.executor.step = poisoned  # type: ignore[method-assign]
        with pytest.raises(icc.runtime.errors.IccError, match="not numbers"):
            llm.embed([bad, good])
        assert (llm.embed([good]) == fine).all()
        assert not llm.loop.has_work()


def test_a_drafter_has_nothing_to_guess(embedder: Callable[..., Compiled], compiled: Callable[..., Compiled]) -> None:
    engine = embedder("llama", headless=True).engine
    with pytest.raises(UsageError, match="compiled for embeddings"):
        icc.load(engine, spec="ngram")
    with pytest.raises(UsageError, match="compiled for embeddings"):
        icc.load(compiled("llama").engine, spec=f"draft:{engine}")


def test_each_task_refuses_the_other(embedder: Callable[..., Compiled], compiled: Callable[..., Compiled]) -> None:
    with icc.load(embedder("llama", headless=True).engine, threads=1) as llm:
        for call in (lambda: llm.generate([[1, 2]]), lambda: llm.logits([1, 2]), lambda: next(llm.stream([1, 2]))):
            with pytest.raises(RequestError, match="compiled for embeddings"):
                call()
        with pytest.raises(RequestError, match="at most"):
            llm.embed([[5] * 129])
        assert not llm.loop.has_work()
    with icc.load(compiled("llama").engine, threads=1) as llm:
        with pytest.raises(RequestError, match="compiled to generate") as refused:
            llm.embed([[1, 2]])
        assert "--task embed" in refused.value.hint


def test_commands_on_an_engine_that_embeds(embedder: Callable[..., Compiled], capsys: Any) -> None:
    from icc.runtime.cli.commands import main

    engine = str(embedder("llama", headless=True).engine)
    assert main(["inspect", engine]) == 0
    assert "task: embed" in (text := capsys.readouterr().out) and "pooling: last" in text
    assert main(["bench", engine, "--prompt-tokens", "20", "--rounds", "1", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["prefill_tokens_per_s"] > 0 and row["output_tokens"] == 0
    assert main(["run", engine, "--ids", "1,2"]) == 24
    assert "compiled for embeddings" in (said := capsys.readouterr().err) and "Traceback" not in said


def test_what_sentence_transformers_wrote_decides(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling((), True)
    assert [Pooling().settled(looks_ahead) for looks_ahead in (False, True)] == [("last",), ("mean",)]
    assert read_pooling(tmp_path, "cls") == Pooling(("cls",), True)
    write_modules(tmp_path, "mean_tokens")
    assert read_pooling(tmp_path) == Pooling(("mean",), False)
    write_modules(tmp_path, "lasttoken", "Dropout", "Normalize")
    assert read_pooling(tmp_path) == Pooling(("last",), True)
    assert read_pooling(tmp_path, "mean") == Pooling(("mean",), True)
    write_modules(tmp_path, "max_tokens")
    assert read_pooling(tmp_path) == Pooling(("max",), False)
    config = tmp_path / "1_Pooling" / "config.json"
    for wrote, kinds in (
        ({"pooling_mode": "weightedmean"}, ("weightedmean",)),
        ({"pooling_mode": ["mean_sqrt_len_tokens", "lasttoken"]}, ("mean_sqrt_len", "last")),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, ("cls", "max")),  # in another order
        ({}, ("mean",)),
    ):
        config.write_text(json.dumps(wrote))
        assert read_pooling(tmp_path) == Pooling(kinds, False)  # type: ignore[arg-type]


def test_prompts_and_lengths_are_read_too(tmp_path: Path) -> None:
    write_modules(tmp_path, "cls_token", "LayerNorm", "Dense", "Normalize")
    write = lambda name, **facts: (tmp_path / name).write_text(json.dumps(facts))  # noqa: E731
    write("1_Pooling/config.json", pooling_mode_cls_token=True, include_prompt=False)
    (tmp_path / "3_Dense").mkdir()
    write("3_Dense/config.json", activation_function="torch.nn.modules.activation.ReLU", use_residual=True)
    write("config_sentence_transformers.json", prompts={"query": "q: ", "none": None}, default_prompt_name="query")
    write("tokenizer_config.json", model_max_length=99)
    found = read_pooling(tmp_path)
    assert [(layer.kind, layer.activation, layer.adds_input) for layer in found.layers] == [
        ("layer_norm", "identity", False), ("dense", "relu", True),
    ]  # fmt: skip
    assert found.normalize and not found.prompted and not found.in_graph(True) and found.max_tokens == 99
    assert (found.prompts, found.default_prompt, found.lower_case) == ({"query": "q: "}, "query", False)
    write("sentence_bert_config.json", max_seq_length=20, do_lower_case=True)
    found = read_pooling(tmp_path)
    assert found.max_tokens == 20 and found.lower_case
    assert read_pooling(tmp_path, "mean").in_graph(True)


def test_what_it_wrote_and_icc_has_not_is_refused(tmp_path: Path) -> None:
    write_modules(tmp_path, "median")
    with pytest.raises(UnsupportedModel, match="pooling_mode_median"):
        read_pooling(tmp_path)
    assert read_pooling(tmp_path, "last") == Pooling(("last",), False)
    write_modules(tmp_path, "cls_token", "LSTM", "Normalize")
    with pytest.raises(UnsupportedModel, match="LSTM"):
        read_pooling(tmp_path, "cls")
    write_modules(tmp_path, "cls_token", "Dense")
    (tmp_path / "2_Dense").mkdir()
    for config, words in (({"activation_function": "x.Mish"}, "Mish"), ({"module_input_name": "rows"}, "one vector")):
        (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModel, match=words):
            read_pooling(tmp_path)
    for text in ("{", "{}"):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(CheckpointError, match="JSON"):
            read_pooling(tmp_path)
    outside = [{"type": SENTENCE + "Transformer"}, {"type": SENTENCE + "Pooling", "path": "../.."}]
    (tmp_path / "modules.json").write_text(json.dumps(outside))
    with pytest.raises(CheckpointError, match="outside"):
        read_pooling(tmp_path)


def test_refusals(compiled: Callable[..., Compiled], embedder: Callable[..., Compiled], tmp_path: Path) -> None:
    output = tmp_path / "x.engine"
    for options, words in (
        ({"task": "embed", "spec": "ngram"}, "--spec"),
        ({"pooling": "mean"}, "--pooling"),
        ({"task": "rank"}, "--task"),
        ({"task": "embed", "pooling": "median"}, "--pooling"),
    ):
        with pytest.raises(UsageError, match=words) as refused:
            icc.compile(compiled("llama").checkpoint, output, **options)
        assert "\n" not in refused.value.message
    with pytest.raises(icc.runtime.errors.IccError, match=r"has no LM head") as missing:
        icc.compile(embedder("llama", headless=True).checkpoint, output)
    assert "--task embed" in missing.value.hint
    assert not output.exists()


def test_an_unknown_pooling_is_refused(embedder: Callable[..., Compiled], tmp_path: Path) -> None:
    source = embedder("llama", headless=True).engine
    raw = json.loads((source / "engine.json").read_text())
    assert raw["embedding"] == {"pooling": "last", "normalize": True, "dimension": 64}
    shutil.copytree(source, tmp_path / "x.engine")
    for change in ({"pooling": "least"}, {"dimension": 63}, {"more": 1}):
        changed = {**raw, "embedding": {**raw["embedding"], **change}}
        del changed["digest"]
        (tmp_path / "x.engine" / "engine.json").write_text(json.dumps(changed))
        with pytest.raises(icc.runtime.errors.IccError, match=r"embedding|vocab_size"):
            icc.load(tmp_path / "x.engine")
