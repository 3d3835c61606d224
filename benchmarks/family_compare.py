"""Compares one model type for `families.py`: a tiny random checkpoint through icc and through transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from family_rows import TOKENS, TOLERANCE, Row
from tiny_config import pattern_of, tiny_configs
from variants import variants

MAX_PARAMETERS = 20_000_000
BUILDERS = {
    "generate": "AutoModelForCausalLM",
    "see": "AutoModelForImageTextToText",
    "embed": "AutoModel",
    "rerank": "AutoModelForSequenceClassification",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What is compared besides the reference interpreter: a CPU engine, an interpreted GPU plan, or both."""

    task: str = "generate"
    engine: bool = False
    plan: bool = False
    verbose: bool = False
    tokens: int = TOKENS
    drawn: bool = False  # a name TYPE#SEED stands for drawn configurations of TYPE


def random_model(config: Any, task: str = "generate") -> Any:
    """The model of `config` for a task, with eager attention and random weights that make every layer matter."""
    import transformers
    from icc.compiler.frontend.source.model import parts_that_can_be_built

    reads: Any = transformers.AutoModelForTextEncoding
    halved = task == "embed" and getattr(config, "is_encoder_decoder", False) and type(config) in reads._model_mapping
    builder = reads if halved else getattr(transformers, BUILDERS[task])
    with contextlib.ExitStack() as stack:
        if task in ("generate", "see"):
            stack.enter_context(parts_that_can_be_built(config.get_text_config()))
        return _filled(builder, config)


def _filled(builder: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"):
        shape = builder.from_config(config)
    count = sum(p.numel() for p in shape.parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"the tiny configuration has {count / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = builder.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def reference(model: Any, ids: Any) -> Any:
    """transformers' own logits [T, vocab], hidden states [T, H] or scores [labels]."""
    import inspect

    import torch

    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()):
        options = {"use_cache": False}
    with torch.no_grad():
        out = model(input_ids=ids[None], **options)
    logits = (out.logits if hasattr(out, "logits") else out.last_hidden_state)[0]
    if not torch.isfinite(logits).all():
        raise ValueError("transformers' own logits are not finite")
    return logits


def walk_one(model_type: str, run: Run) -> Row:
    """Build, save, trace and compare one type."""
    import torch
    from icc.compiler.errors import IccError
    from icc.compiler.frontend.load import load_graph
    from icc.compiler.graph.interpret import interpret

    row = Row(model_type, time.strftime("%Y-%m-%d"))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model"
        ids = torch.randint(3, 95 if run.drawn else 119, (run.tokens,), generator=torch.Generator().manual_seed(1))
        try:
            model, expected = _save_first_that_works(model_type, path, ids, row, run)
            graph = load_graph(path, task="generate" if run.task == "see" else run.task)
            row.traced = True
            found = interpret(graph, ids.tolist())
            scored = found[0 if graph.picked == "first" else -1]
            row.error = _difference(scored if run.task == "rerank" else found, expected)
            if run.engine:
                _compare_engine(path, Path(scratch) / "engine", ids.tolist(), expected, row, run)
            if run.plan:
                _compare_plan(path, ids.tolist(), expected, row)
            if max(row.errors) > TOLERANCE:
                row.noise = noise_of(model, ids, expected)
            compared = {"the": row.error, "the engine's": row.engine_error, "the interpreted plan's": row.plan_error}
            for whose, error in compared.items():
                if error is not None and error > row.limit:
                    row.reason = f"{whose} logits differ"
        except IccError as error:
            row.reason = f"{type(error).__name__}: {error.message}".replace(str(path), "MODEL")
        except Exception as error:
            row.reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0][:300]
            if not row.built:
                row.reason = f"transformers: {row.reason}"
            else:
                row.reason = f"icc crashed: {row.reason} {traceback.format_exc().strip().split(chr(10))[-3].strip()}"
    row.seconds = round(time.monotonic() - start, 1)
    return row


def _save_first_that_works(model_type: str, path: Path, ids: Any, row: Row, run: Run) -> tuple[Any, Any]:
    """Save the first tiny configuration whose model runs in transformers; the model and its logits."""
    last: Exception | None = None
    configs = ((config, {}) for config in tiny_configs(model_type, run.task in ("generate", "see")))
    for config, changed in variants(model_type) if run.drawn else configs:
        try:
            if run.task == "rerank":
                config.num_labels = 1
            row.changed = repr(changed) if changed else ""
            model = random_model(config, run.task)
            expected = reference(model, ids)
            model.save_pretrained(path)
            if model.config.model_type != config.model_type:  # a part of another model
                config.save_pretrained(path)
            row.pattern = pattern_of(config)
            row.built = True
            return model, expected
        except Exception as error:
            last = last or error
    raise last or ValueError("its class takes none of the changes that were drawn")


def _compare_engine(path: Path, engine: Path, ids: list[int], expected: Any, row: Row, run: Run) -> None:
    """Compile for the CPU and compare the engine's logits; fills `compiled` and `engine_error`."""
    import icc
    import torch

    row.compiled = False
    limits = {"max_step_tokens": 16, "max_batch_size": 4, "max_seq_len": 96} if run.drawn else {}
    task: Any = {} if run.task in ("generate", "see") else {"task": run.task}
    icc.compile(path, engine, target="native", quant="none", **limits, **task)
    row.compiled = True
    with icc.load(engine, threads=1) as llm:
        if run.task == "embed":
            pooled = expected.mean(0) if llm.manifest.embedding.pooling == "mean" else expected[-1]
            row.engine_error = _difference(torch.tensor(llm.embed([ids])[0]), pooled / pooled.norm())
            return
        row.engine_error = _difference(torch.tensor(llm.logits(ids)), expected)
        if run.drawn:
            row.engine_error = max(row.engine_error, _difference(torch.tensor(_in_steps(llm, ids)), expected))


def _in_steps(llm: Any, ids: list[int]) -> Any:
    """Logits of a prompt that is read in uneven chunks, and at its end token by token."""
    import numpy as np
    from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence

    tables = tuple(tuple(range(-(-len(ids) // group.block_size))) for group in llm.executor.groups)
    start, rows = 0, []
    for end in (3, 4, 15, *range(24, len(ids) + 1)):
        part = ScheduledSequence(0, tuple(ids[start:end]), start, tables, end - start)
        rows.append(llm.executor.step(ScheduledBatch((part,))).copy())
        start = end
    return np.concatenate(rows)


def _compare_plan(path: Path, ids: list[int], expected: Any, row: Row) -> None:
    """Plan for a GPU and run the plan in Triton's interpreter, whole prompts and chunks of them; fills `plan_error`."""
    import torch
    from icc.runtime.format.manifest import Limits

    tests = Path(__file__).resolve().parents[1] / "tests"
    sys.path[:0] = [str(tests), str(tests / "triton")]
    from building import build  # type: ignore[import-not-found]

    engine = build(path, "none", Limits(max_seq_len=48, max_batch_size=2, max_step_tokens=16))
    with engine.llm() as llm:
        row.plan_error = _difference(torch.tensor(llm.logits(ids)), expected)


def noise_of(model: Any, ids: Any, expected: Any) -> float | None:
    """The distance of transformers' float32 logits from its float64 logits; None if it cannot compute float64."""
    import torch

    model.config.get_text_config()._experts_implementation = model.config._experts_implementation = "eager"
    torch.set_default_dtype(torch.float64)
    try:
        exact = reference(model.double(), ids)
    except Exception:  # any error of the model's code
        return None
    finally:
        torch.set_default_dtype(torch.float32)
    return float((expected.double() - exact).abs().max() / exact.abs().max())


def _difference(found: Any, expected: Any) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
