"""The runtime's commands: run, serve, bench, eval, inspect. The standard library parses them: engines have no click."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import IccError, UsageError
from .load import add_load, load_options
from .serve import add_batch, add_serve, run_batch, run_serve

if TYPE_CHECKING:
    from ..llm import LLM
    from ..speculate.speculator import Speculator

_INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


def main(argv: Sequence[str] | None = None, engine: str | None = None, prog: str | None = None) -> int:
    """Run one command and return its exit code.

    engine: the engine directory if it is implied (`python ENGINE run ...`); otherwise it is the command's first
    argument.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if engine is None and argv[:2] == ["bench", "serve"]:  # measures a server, wherever it is, rather than an engine
        from ..loadtest.cli import main as loadtest

        return _guarded("--debug" in argv, lambda: loadtest(argv[2:], prog))
    arguments = _parser(engine, prog).parse_args(argv)
    return _guarded(arguments.debug, lambda: arguments.command(arguments))


def _guarded(debug: bool, command: Callable[[], int]) -> int:
    """The exit code of a command; an IccError becomes one line, a hint and its own code."""
    try:
        return command()
    except IccError as error:
        if debug:
            raise
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read our output has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(engine: str | None, prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Run an icc engine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text, command, add_options in (
        ("run", "complete a prompt, streamed to the terminal", _run, _add_run),
        ("serve", "serve the OpenAI API over HTTP", run_serve, _add_serve),
        ("batch", "answer a file of requests, without a server", run_batch, _add_batch),
        ("bench", "measure an engine's throughput (bench serve: a server's)", _bench, _add_bench),
        ("eval", "perplexity and bits per byte of a text", _eval, _add_eval),
        ("inspect", "what is inside the engine", _inspect, _add_inspect),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        if engine is None:
            sub.add_argument("engine", metavar="ENGINE", help="engine directory")
        sub.set_defaults(command=command, **({} if engine is None else {"engine": engine}))
        add_options(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON value")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _load(arguments: argparse.Namespace) -> LLM:
    from ..llm import open_llm

    return open_llm(load_options(arguments))


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_serve(parser)
    add_load(parser)


def _add_batch(parser: argparse.ArgumentParser) -> None:
    add_batch(parser)
    add_load(parser)


def _int_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers like 1,2,3") from None


def _add_run(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", help="text to complete")
    prompt.add_argument("--ids", type=_int_list, help="token ids to complete: 1,2,3")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the engine's)")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], help="end before this string (repeatable)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    add_load(parser)


def _run(arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    from ..requests.params import SamplingParams
    from .run import as_json, run_prompt

    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )
    with _load(arguments) as llm:
        load_s = time.perf_counter() - start
        prompt = arguments.prompt if arguments.ids is None else arguments.ids
        result = run_prompt(llm, prompt, params, (lambda text: None) if arguments.json else _show)
        speculator = llm.loop.speculator
    if arguments.json:
        print(json.dumps(as_json(result, load_s), ensure_ascii=False))
    else:
        print(flush=True)
    completion = result.completion
    print(
        f"load {load_s:.2f} s, first token {result.ttft_s * 1e3:.1f} ms, "
        f"prompt {len(completion.prompt_token_ids)} tokens at {result.prompt_tokens_per_s:.1f} tok/s, "
        f"decode {len(completion.token_ids)} tokens at {result.decode_tokens_per_s:.1f} tok/s, "
        f"ended by {completion.finish_reason}",
        file=sys.stderr,
    )
    if speculator is not None:
        print(f"{speculator.drafter.name}: {_accepted(speculator)}", file=sys.stderr)
    if completion.finish_reason == "error":
        raise IccError("the model gave logits that are not numbers", "the engine or its checkpoint may be damaged")
    return 0


def _accepted(speculator: Speculator) -> str:
    counts = speculator.counts
    if not counts.drafts:
        return f"no guesses in {counts.steps} steps, where they were not expected to pay"
    return (
        f"{counts.tokens_per_step:.2f} tokens per step, {counts.accepted} of {counts.guesses} guesses accepted "
        f"in {counts.drafts} of {counts.steps} steps"
    )


def _show(text: str) -> None:
    sys.stdout.write(text.encode(sys.stdout.encoding or "utf-8", "replace").decode(sys.stdout.encoding or "utf-8"))
    sys.stdout.flush()


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=_int_list, default=[1], help="one or several: 1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", metavar="FILE", help="with --spec A,B: a JSON list of texts to go on with")
    parser.add_argument("--always", action="store_true", help="with --spec: draft at every step, whatever it costs")
    add_load(parser)


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.prompts is not None:
        return _bench_spec(arguments)
    from .bench import BenchOptions, as_json, as_table, run_bench

    options = BenchOptions(
        arguments.prompt_tokens, arguments.output_tokens, arguments.batch_size, arguments.rounds, arguments.seed
    )
    with _load(arguments) as llm:
        results = run_bench(llm, options)
    print(json.dumps(as_json(results)) if arguments.json else as_table(results))
    return 0


def _bench_spec(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from .bench_spec import SpecBenchOptions, as_json, as_table, read_prompts, run_spec_bench

    names = (arguments.spec or "ngram").split(",")
    arguments.spec = "none"
    with _load(arguments) as llm:
        prompts = read_prompts(llm, Path(arguments.prompts))
        options = SpecBenchOptions(
            names,
            prompts,
            arguments.output_tokens,
            arguments.batch_size,
            rounds=arguments.rounds,
            always=arguments.always,
        )
        results = run_spec_bench(llm, options)
    print(json.dumps(as_json(results)) if arguments.json else as_table(results))
    return 0


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text to predict")
    parser.add_argument("--window", type=int, help="tokens of context (default: 1024 or the engine's limit)")
    parser.add_argument("--stride", type=int, help="tokens scored per window (default: half a window)")
    add_load(parser)


def _eval(arguments: argparse.Namespace) -> int:
    from .evaluate import evaluate_text

    try:
        with open(arguments.text, encoding="utf-8", newline="") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{arguments.text} cannot be read as UTF-8 text: {error}") from error
    with _load(arguments) as llm:
        result = evaluate_text(llm, text, window=arguments.window, stride=arguments.stride)
    if arguments.json:
        print(json.dumps(result.as_json()))
    else:
        print(f"tokens {result.tokens}, bytes {result.bytes}")
        print(f"nll per token {result.nll_per_token:.5f} nats, perplexity {result.perplexity:.4f}")
        print(f"bits per byte {result.bits_per_byte:.5f}")
    return 0


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    del parser  # nothing beyond what every command has


def _inspect(arguments: argparse.Namespace) -> int:
    from .inspect import as_text, describe_engine

    facts = describe_engine(arguments.engine)
    print(json.dumps(facts) if arguments.json else as_text(facts))
    return 0
