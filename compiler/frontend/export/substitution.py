"""Finds code of a model that cannot be traced, and replaces it by ops. A `Substitution` describes each such
computation.

Modeling files write out loops over the tokens or over the experts, and attention in blocks of tokens: a trace of them
would depend on the number of tokens or on values. Nothing is replaced because of its name: candidates are run on small
random inputs, and their results are compared with a reference.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

_TOLERANCE = 1e-4
_MOST_ELEMENTS = 2**24  # elements of a parameter of a small copy
Code = Callable[..., Any]


@dataclass(frozen=True)
class Candidate:
    """A function of a model's code: `owner.name`, where the owner is a module class or a modeling file.

    function: the function without its decorators. module: an instance of the class, on meta; None for a file's
    function.
    """

    owner: Any
    name: str
    function: Code
    module: Any = None

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of its positional parameters, without `self`."""
        code = getattr(self.function, "__code__", None)
        names = code.co_varnames[: code.co_argcount] if code is not None else ()
        return names[1:] if names[:1] == ("self",) else names


@dataclass(frozen=True)
class CodeTrial:
    """One run of the code on small inputs, and the arguments of the reference. same: whether the results must agree."""

    code: Callable[[], Any]
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    same: bool = True


@dataclass(frozen=True)
class Substitution:
    """A computation that modeling files write out, and its replacement in a trace.

    find: whether a candidate is worth a trial, by its parameters and by the parts of its module.
    small: trials of a candidate on small inputs, at least one; random numbers come from the generator.
    reference: what the code must compute in every trial; if the code returns a tuple, its first values.
    replacement: the functions that replace a candidate, by the names in its owner; they leave traced ops. If one
    returns a tensor where the code returns a tuple, the rest of the tuple (final states and the like) becomes None.

    An exception in `find`, `small` or `reference` means that the candidate does not match.
    """

    find: Callable[[Candidate], bool]
    small: Callable[[Candidate, torch.Generator], Iterable[CodeTrial]]
    reference: Code
    replacement: Callable[[Candidate], Mapping[str, Code]]


@contextlib.contextmanager
def substituted(model: nn.Module, substitutions: Sequence[Substitution]) -> Iterator[None]:
    """A context in which recognised functions in the code of `model` are replaced."""
    found = [(candidate, _functions(candidate, substitutions)) for candidate in candidates(model)]
    replaced = {candidate.owner for candidate, functions in found if functions}
    patches = [(candidate.owner, name, code) for candidate, functions in found for name, code in functions.items()]
    for candidate, functions in found:
        if not functions and replaced.intersection(getattr(candidate.owner, "__mro__", ())[1:]):
            kept = getattr(candidate.owner, candidate.name)  # it may inherit the replaced one from a recognised class
            patches.append((candidate.owner, candidate.name, kept))
    with contextlib.ExitStack() as stack:
        for owner, name, code in patches:
            stack.enter_context(mock.patch.object(owner, name, code))
        yield


def candidates(model: nn.Module) -> Iterator[Candidate]:
    """The methods of the classes of a model's modules, each once, and the functions in the namespaces of their
    files."""
    modules = {type(module): module for module in model.modules()}
    for cls, module in modules.items():
        for name, value in {"forward": cls.forward, **vars(cls)}.items():
            if inspect.isfunction(value):
                yield Candidate(cls, name, inspect.unwrap(value), module)
    for file in sorted({cls.__module__ for cls in modules} & sys.modules.keys()):
        for name, value in list(vars(sys.modules[file]).items()):
            if inspect.isfunction(value):
                yield Candidate(sys.modules[file], name, inspect.unwrap(value))


def recognised_as(candidate: Candidate, substitutions: Sequence[Substitution]) -> Substitution | None:
    """The first substitution whose reference agrees with a candidate; None if none does."""
    return next((each for each in substitutions if _values_of(candidate, each)), None)


def _functions(candidate: Candidate, substitutions: Sequence[Substitution]) -> Mapping[str, Code]:
    """The replacements of functions of a candidate's owner, by name; empty if nothing matches."""
    for each in substitutions:
        if count := _values_of(candidate, each):
            return {name: _with_rest(code, count) for name, code in each.replacement(candidate).items()}
    return {}


def _values_of(candidate: Candidate, substitution: Substitution) -> int:
    """The number of values that a candidate returns; 0 if it does not match the substitution."""
    count = 0
    with torch.device("cpu"), torch.no_grad():
        try:
            if not substitution.find(candidate):
                return 0
            for trial in substitution.small(candidate, torch.Generator().manual_seed(0)):
                found = _tuple(trial.code())
                if _agree(found, _tuple(substitution.reference(*trial.args, **trial.options))) != trial.same:
                    return 0
                count = len(found)
        except Exception:  # a model's own code, on inputs that it was not written for
            return 0
    return count


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _agree(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    return len(found) >= len(expected) and all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), _TOLERANCE, _TOLERANCE)
        for a, b in zip(found, expected, strict=False)
    )


def _with_rest(code: Code, count: int) -> Code:
    """The code, with None for all values after the first if the replaced function returns several."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = code(*args, **kwargs)
        return (out, *[None] * (count - 1)) if count > 1 and isinstance(out, Tensor) else out

    return run if count > 1 else code


def small_copy(module: nn.Module, sizes: Mapping[int, int], generator: torch.Generator) -> Any:
    """A copy of a module with other sizes and random weights. ValueError if a weight is still large.

    sizes: new values of integer attributes and of the weights' axes, by the old values. The first axis of a
    three-dimensional weight, which counts experts, is kept.
    """
    small = copy.deepcopy(module)
    for part in small.modules():
        for name, value in vars(part).items():
            if type(value) is int:
                setattr(part, name, sizes.get(value, value))
        for name, weight in part._parameters.items():
            if weight is not None:
                kept = 1 if weight.dim() == 3 else 0
                shape = [*weight.shape[:kept], *(sizes.get(n, n) for n in weight.shape[kept:])]
                if math.prod(shape) > _MOST_ELEMENTS:
                    raise ValueError(f"{name} has {shape} numbers")
                part._parameters[name] = nn.Parameter(torch.randn(shape, generator=generator))
    return small
