"""Loading: opens an engine, its kernels and its drafter, and makes an LLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from os import fspath
from typing import ParamSpec, TypeVar

from msgspec.structs import replace

from .executor.base import Executor
from .executor.open import Resources, open_executor
from .format.load import Engine
from .llm import LLM
from .opening import Begun, begin
from .options import LoadOptions
from .prefixes.compiled import PromptsOfEngine
from .prefixes.pinned import PinnedPrefixes
from .speculate.choose import choose_speculator
from .tokenizer import Tokenizer

Fields = ParamSpec("Fields")
Loaded = TypeVar("Loaded")


def load_with_fields(
    options: Callable[Fields, LoadOptions],
) -> Callable[[Callable[[LoadOptions], Loaded]], Callable[Fields, Loaded]]:
    """Decorator: a function of LoadOptions becomes a function of its fields as keywords."""

    def decorate(opener: Callable[[LoadOptions], Loaded]) -> Callable[Fields, Loaded]:
        @wraps(opener)
        def load(*args: Fields.args, **kwargs: Fields.kwargs) -> Loaded:
            return opener(options(*args, **kwargs))

        result = opener.__annotations__["return"]
        load.__signature__ = signature(options).replace(return_annotation=result)  # type: ignore[attr-defined]
        return load

    return decorate


@load_with_fields(LoadOptions)
def load(options: LoadOptions) -> LLM:
    """Load an engine, ready to generate. The keywords are the fields of LoadOptions, which describes them. Errors are
    IccErrors."""
    return open_llm(options)


def open_llm(options: LoadOptions, begun: Begun | None = None, shares_cache: bool = False, checks: bool = False) -> LLM:
    """Load an engine with these options; see `load`. begun: the result of `begin` if that was called already; None: it
    is called here. shares_cache: see Resources. checks: verify its answers, if it has canary prompts, even if the
    options do not ask for it."""
    begun = begun or begin(options)
    engine = begun.opening.finish()
    try:
        compiled = PromptsOfEngine.of(engine)
        own = Resources(
            gpu=begun.gpu,
            threads=options.threads,
            cores=options.core_set,
            kv_bytes=options.kv_bytes,
            swap_bytes=options.swap_bytes,
            more_blocks=() if compiled is None else tuple(compiled.room()),
            shares_cache=shares_cache,
        )
        executor = open_executor(engine, resources=own)
        if options.verify_answers or checks:  # in the cache's first blocks, where compiled prompts will be
            _check_answers(engine, executor, required=options.verify_answers)
        tokenizer_json = engine.tokenizer_json()
        tokenizer = None if tokenizer_json is None else Tokenizer(tokenizer_json, engine.vocabulary())
        others = replace(own, kv_bytes=None, swap_bytes=0, more_blocks=(), shares_cache=False)
        second = partial(open_executor, resources=others)
    except BaseException:
        engine.close()
        raise
    llm = LLM(engine.manifest, executor, tokenizer, engine, make_executor=second)
    try:
        accept, adapters = options.acceptance, llm.adapters
        llm.loop.speculator = choose_speculator(options.spec, engine, executor, second, accept, adapters)
        for name, path in (options.adapters or {}).items():
            llm.load_adapter(name, fspath(path))
        llm.prompting.prepare()
        if compiled is not None:
            llm.loop.keep(PinnedPrefixes.of(compiled, executor))
    except BaseException:
        llm.close()
        raise
    return llm


def _check_answers(engine: Engine, executor: Executor, required: bool) -> None:
    from .answers import verify_answers

    try:
        verify_answers(engine, executor, required)
    except BaseException:
        executor.close()
        raise
