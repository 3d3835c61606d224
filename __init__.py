"""icc: an ahead-of-time inference compiler for language models. Importing it loads nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compiler.api import compile_model as compile
    from .compiler.api import refit_model as refit
    from .compiler.progress import CompileProgress
    from .runtime import ray
    from .runtime.async_llm import AsyncLLM, load_async
    from .runtime.errors import IccError
    from .runtime.llm import LLM
    from .runtime.loading import load
    from .runtime.reading.parts import ToolCall
    from .runtime.requests.generation import Completion
    from .runtime.requests.increment import Increment
    from .runtime.requests.params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompileProgress",
    "Completion",
    "IccError",
    "Increment",
    "SamplingParams",
    "ToolCall",
    "__version__",
    "compile",
    "load",
    "load_async",
    "ray",
    "refit",
]

# public name -> (module, name there), imported when first asked for
_LAZY = {
    "compile": (".compiler.api", "compile_model"),
    "refit": (".compiler.api", "refit_model"),
    "CompileProgress": (".compiler.progress", "CompileProgress"),
    "load": (".runtime.loading", "load"),
    "LLM": (".runtime.llm", "LLM"),
    "load_async": (".runtime.async_llm", "load_async"),
    "AsyncLLM": (".runtime.async_llm", "AsyncLLM"),
    "Completion": (".runtime.requests.generation", "Completion"),
    "Increment": (".runtime.requests.increment", "Increment"),
    "SamplingParams": (".runtime.requests.params", "SamplingParams"),
    "ToolCall": (".runtime.reading.parts", "ToolCall"),
    "IccError": (".runtime.errors", "IccError"),
    "ray": (".runtime.ray", ""),  # a module
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    found = import_module(module, __name__)
    value = getattr(found, attribute) if attribute else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
