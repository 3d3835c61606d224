"""Walk the model types of the installed transformers: traced | compiled | logits equal | refused and why.

Each type gets a tiny random checkpoint, saved and loaded like any other, in a process of its own with a time limit.
Equal means within TOLERANCE of transformers' float32 logits, or, where those are themselves far from its float64 ones
(random weights in twenty layers amplify what is rounded), within NOISE times that distance:

    python benchmarks/families.py [TYPE ...] [--refused] [--engine] [--plan h100] [--jobs 2] [--limit 120] [--out PATH]

A walk of some types, named or --refused, keeps what PATH.json says of the others. By default these are the causal-LM
types; with --task embed those that transformers lists as encoders of text, whose hidden states are compared (by
engines: their mean), and with --task rerank those of sequence classifiers, whose score is.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiny_config import pattern_of, tiny_configs
from variants import variants

TOLERANCE = 2e-5
NOISE = 4.0
TOKENS = 21
MAX_PARAMETERS = 20_000_000
BUILDERS = {
    "generate": "AutoModelForCausalLM",
    "embed": "AutoModel",
    "rerank": "AutoModelForSequenceClassification",
}


@dataclasses.dataclass
class Row:
    """What happened to one model type. `error` is the largest logit difference relative to the largest logit.

    walked: the day. pattern: its layers by kind. plan_error: of a GPU's launch plan, interpreted. noise: how far
    transformers' float32 logits are from its float64 ones, where an error is above the tolerance. engine_whole: the
    engine had the layers of the pattern, not two. changed: what was drawn.
    """

    model_type: str
    walked: str = ""
    pattern: str = ""
    built: bool = False
    traced: bool = False
    compiled: bool | None = None
    error: float | None = None
    engine_error: float | None = None
    plan_error: float | None = None
    noise: float | None = None
    engine_whole: bool = False
    changed: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def errors(self) -> list[float]:
        """Of every comparison that was made."""
        return [e for e in (self.error, self.engine_error, self.plan_error) if e is not None]

    @property
    def equal(self) -> bool:
        """Whether every comparison that was made is within the tolerance."""
        return self.traced and bool(self.errors) and max(self.errors) <= self.limit

    @property
    def limit(self) -> float:
        """The largest error that counts as equal."""
        return max(TOLERANCE, NOISE * (self.noise or 0.0))

    def joined(self, earlier: Row | None) -> Row:
        """This row, with the comparisons that an earlier walk made and this one did not."""
        if earlier is None or not self.equal or not earlier.equal:
            return self
        made = {k: v for k, v in dataclasses.asdict(self).items() if v is not None and v != "" and v is not False}
        made["reason"] = self.reason
        return Row(**{**dataclasses.asdict(earlier), **made})


@dataclasses.dataclass(frozen=True)
class Run:
    """What is compared besides the reference interpreter: a CPU engine, an interpreted GPU plan."""

    task: str = "generate"
    engine: bool = False
    plan: bool = False
    verbose: bool = False
    tokens: int = TOKENS
    drawn: bool = False  # types are called TYPE#SEED: drawn configurations of them


def random_model(config: Any, task: str = "generate") -> Any:
    """The model of `config` for a task, eager attention, with random weights that make every layer matter."""
    import transformers
    from icc.compiler.frontend.source.model import parts_that_can_be_built

    reads: Any = transformers.AutoModelForTextEncoding
    halved = task == "embed" and getattr(config, "is_encoder_decoder", False) and type(config) in reads._model_mapping
    builder = reads if halved else getattr(transformers, BUILDERS[task])
    with contextlib.ExitStack() as stack:
        if task == "generate":
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
            graph = load_graph(path, task=run.task)
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
    configs = ((config, {}) for config in tiny_configs(model_type, run.task == "generate"))
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
    task: Any = {} if run.task == "generate" else {"task": run.task}
    icc.compile(path, engine, target="native", quant="none", **limits, **task)
    row.compiled = True
    row.engine_whole = True
    with icc.load(engine, threads=1) as llm:
        if run.task == "embed":
            pooled = expected.mean(0) if llm.manifest.embedding.pooling == "mean" else expected[-1]
            row.engine_error = _difference(torch.tensor(llm.embed([ids])[0]), pooled / pooled.norm())
            return
        row.engine_error = _difference(torch.tensor(llm.logits(ids)), expected)
        if run.drawn:
            row.engine_error = max(row.engine_error, _difference(torch.tensor(_in_steps(llm, ids)), expected))


def _in_steps(llm: Any, ids: list[int]) -> Any:
    """Logits of a prompt that is read in uneven chunks, its end token by token."""
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
    """The distance of transformers' float32 logits from its float64 ones; None where it cannot compute these."""
    import torch

    model.config.get_text_config()._experts_implementation = model.config._experts_implementation = "eager"
    torch.set_default_dtype(torch.float64)
    try:
        exact = reference(model.double(), ids)
    except Exception:  # whatever the model's code says
        return None
    finally:
        torch.set_default_dtype(torch.float32)
    return float((expected.double() - exact).abs().max() / exact.abs().max())


def _difference(found: Any, expected: Any) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _child(connection: Any, model_type: str, run: Run) -> None:
    import torch

    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if not run.verbose:
            quiet = stack.enter_context(open("/dev/null", "w"))
            stack.enter_context(contextlib.redirect_stdout(quiet))
            stack.enter_context(contextlib.redirect_stderr(quiet))
        warnings.filterwarnings("ignore")
        connection.send(walk_one(model_type, run))


def walk(types: list[str], run: Run, jobs: int, limit: float) -> Iterator[Row]:
    """Rows of all types as they are done; one that takes longer than `limit` seconds, or dies, says so."""
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once, in the parent
    waiting = collections.deque(types)
    running: dict[str, tuple[Any, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.popleft()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(sender, name, run))
            process.start()
            sender.close()
            running[name] = process, receiver, time.monotonic()
        multiprocessing.connection.wait([r for _, r, _ in running.values()], timeout=1.0)
        for name, (process, receiver, started) in list(running.items()):
            row = None
            if receiver.poll():
                try:
                    row = receiver.recv()
                except EOFError:
                    process.join()
                    row = Row(name, reason=f"the process died with exit code {process.exitcode}")
            elif time.monotonic() - started > limit:
                process.kill()
                row = Row(name, reason=f"not done within {limit:.0f} s")
            if row is not None:
                process.join()
                del running[name]
                yield row


def _show(row: Row, done: int, total: int) -> None:
    state = "equal" if row.equal else "traced" if row.traced else "refused"
    error = "" if row.error is None else f" {row.error:.1e}"
    print(f"[{done}/{total}] {row.model_type:28} {state:8}{error} {row.seconds:5.1f}s {row.reason}", flush=True)


TITLES = {"generate": "Causal-LM types", "embed": "Text encoders", "rerank": "Sequence classifiers"}


def markdown(rows: list[Row], versions: str, task: str) -> str:
    """The table and its counts."""
    mark = {True: "yes", False: "no", None: ""}
    count = f"{len(rows)} types: {sum(r.traced for r in rows)} traced, {sum(r.equal for r in rows)} with equal logits"
    compiled, planned = (
        sum(r.equal and e is not None for r, e in found)
        for found in (
            [(r, r.engine_error) for r in rows],
            [(r, r.plan_error) for r in rows],
        )
    )
    whole = sum(r.equal and r.engine_error is not None and r.engine_whole for r in rows)
    count += f"; of these {compiled} as CPU engines ({whole} of the whole pattern), {planned} as interpreted h100 plans"
    lines = [
        f"# {TITLES[task]} of transformers through icc",
        "",
        f"{versions}; one tiny random checkpoint each, with the layer pattern, the routing and the kinds of attention "
        f"of the type's published default configuration, {TOKENS} tokens, against eager float32 logits; error is the "
        f"largest difference over the largest logit, equal means at most {TOLERANCE:g}, or at most {NOISE:g} times "
        "the noise: how far transformers' float32 logits are from its float64 ones, worked out where the tolerance is "
        "exceeded (benchmarks/families.py).",
        "",
        f"{count}.",
        "",
        "Engines marked ° are of an earlier walk, of two layers whatever the published pattern; not every row was "
        "asked for an engine or a plan.",
        "",
        "| type | walked | layers | traced | equal | CPU engine | h100 plan | noise | refused, and why |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = ["" if e is None else f"{e:.0e}" for e in (row.engine_error, row.plan_error, row.noise)]
        if row.engine_error is not None and not row.engine_whole:
            errors[0] += "°"
        reason = row.reason.replace("|", "\\|")
        equal = f"{row.error:.0e}" if row.error is not None else ""
        cells = (row.model_type, row.walked, row.pattern, mark[row.traced], equal, *errors, reason)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def kept_rows(path: Path | None) -> dict[str, Row]:
    """The rows of an earlier walk by type, from its JSON file; {} where there is none."""
    if path is None or not path.with_suffix(".json").exists():
        return {}
    return {row["model_type"]: Row(**row) for row in json.loads(path.with_suffix(".json").read_text())}


def types_of(task: str) -> list[str]:
    """What transformers lists for a task."""
    from transformers.models.auto import modeling_auto as auto

    if task == "generate":
        return sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if task == "rerank":
        return sorted(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    return sorted({*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES})


def write(rows: list[Row], path: Path, versions: str, task: str) -> None:
    """PATH.md and PATH.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(markdown(rows, versions, task))
    path.with_suffix(".json").write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")


def main(argv: list[str]) -> int:
    """Command line; exit code 1 if a traced type has other logits than transformers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--task", choices=sorted(BUILDERS), default="generate")
    parser.add_argument("--refused", action="store_true", help="those that PATH.json does not say are equal")
    parser.add_argument("--engine", action="store_true", help="also compile for the CPU and run the engine")
    parser.add_argument("--plan", action="store_true", help="also run a GPU's launch plan in Triton's interpreter")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per type")
    parser.add_argument("--out", type=Path, help="write PATH.md and PATH.json, and keep what they say of other types")
    parser.add_argument("--verbose", action="store_true", help="show what the workers print")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    if options.plan:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch
    import transformers
    from icc.compiler.frontend import load  # noqa: F401  (so that the workers inherit it)

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    kept = kept_rows(options.out)
    names = options.types or types_of(options.task)
    if options.refused:
        names = [name for name in names if name not in kept or not kept[name].equal]
    rows: list[Row] = []
    for row in walk(
        names, Run(options.task, options.engine, options.plan, options.verbose), options.jobs, options.limit
    ):
        rows.append(row)
        _show(row, len(rows), len(names))
        kept[row.model_type] = row.joined(kept.get(row.model_type))
        if options.out:
            write(sorted(kept.values(), key=lambda r: r.model_type), options.out, versions, options.task)
    print(f"{len(rows)} types: {sum(r.traced for r in rows)} traced, {sum(r.equal for r in rows)} equal")
    return int(any(r.traced and not r.equal for r in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
