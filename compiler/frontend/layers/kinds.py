"""Traces one layer of each kind, however deep the model is.

A layer is a child of a module list. While a model is traced, the first layer of a kind runs between marks, and the
attributes that it reads from its modules are recorded. A later layer with the same structure, an equal call and equal
values of all recorded attributes would compute the same from other tensors and weights, whatever else differs, such as
its index. It does not run: the exported program has an op `repeated` for each of its results, and replay.py puts copies
of the first layer's nodes in its place.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import IccError, TraceError
from ...weights.handles import Weight
from .marks import enter_all, kinds_that_write_through_views, leave_all, resolved
from .reads import Reads, recorded_reads, same_state, state_id
from .values import LayerCall, Opaque, tensors_in


class NotRepeatable(TraceError):
    """A layer cannot be cut out of the trace: every layer must be traced."""


@dataclass(frozen=True)
class RepeatedLayer:
    """A layer at `path` that equals the traced layer of its kind at `source`.

    kind: the number of the kind. renames: its weights' names by those of the traced layer. slots: numbers of the inputs
    that are not those of the traced layer; these are the inputs of the op `repeated`.
    """

    kind: int
    source: str
    path: str
    renames: dict[str, str]
    slots: tuple[int, ...]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def _layers(model: nn.Module) -> Iterator[_Layer]:
    """The layers none of whose modules is used elsewhere in the model."""
    places = Counter(state_id(module) for _, module in model.named_modules(remove_duplicate=False))
    for path, parent in model.named_modules():
        if isinstance(parent, nn.ModuleList) and len(parent) > 1:
            for name, child in parent.named_children():
                layer = _Layer(f"{path}.{name}", child)
                if len(layer.modules) > 1 and all(places[state_id(m)] == 1 for m in layer.modules.values()):
                    yield layer


class _Layer:
    """A layer of the model: its modules and tensors by relative path, and its structure."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.tensors = _tensors(module)
        self.structure = (
            [(name, type(m)) for name, m in self.modules.items()],
            [(name, type(t), t.shape, t.dtype) for name, t in self.tensors.items()],
        )


@dataclass(frozen=True)
class _Kind:
    """The first layer of a kind: its call, the attributes it read, and the pattern of its results.

    written: whether it wrote to a result after creating it.
    """

    number: int
    layer: _Layer
    call: LayerCall
    reads: Reads
    written: bool
    outcome: Any


class LayerKinds:
    """The kinds of layers found while `model` is traced, and their `repeats`."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Weight]) -> None:
        self.repeats: list[RepeatedLayer] = []
        self._weights = weights
        self._kinds: list[_Kind] = []
        self._marked = 0
        self._inside = False
        self._layers = {state_id(layer.modules[""]): layer for layer in _layers(model)}
        self._aliases: dict[int, list[str]] = {}
        for name, tensor in _tensors(model).items():
            self._aliases.setdefault(id(tensor), []).append(name)

    def start(self) -> None:
        """Forget all kinds and repeats: torch.export may run a model more than once."""
        self.repeats, self._kinds, self._marked = [], [], 0

    def scout(self, run: Callable[[], Any]) -> None:
        """Find the repeats for `emptied` by running the model outside torch.export. Raises IccError if icc refuses the
        model. None are found if only torch.export can run it."""
        self.start()
        try:
            with self.intercepted():
                run()
        except IccError:
            raise
        except Exception:  # a model that only torch.export can run on meta
            self.start()

    @contextlib.contextmanager
    def intercepted(self) -> Iterator[None]:
        """A context in which the first layer of each kind runs between marks, and repeated layers do not run."""
        classes = {type(layer.modules[""]) for layer in self._layers.values()}
        originals = {cls: cls.forward for cls in classes}
        with contextlib.ExitStack() as stack:
            for cls, forward in originals.items():
                stack.enter_context(mock.patch.object(cls, "forward", self._around(forward)))
            yield

    def check(self, graph: torch.fx.Graph) -> None:
        """NotRepeatable unless the exported program can be cut between the marks."""
        # The export shows a write through a view of a tensor at the tensor's next use, which may be in the next layer.
        through_views = kinds_that_write_through_views(graph)
        for kind in self._kinds:
            if kind.written and kind.number in through_views:
                raise NotRepeatable(f"layer {kind.layer.path} writes to parts of its results")

    @contextlib.contextmanager
    def emptied(self) -> Iterator[None]:
        """A context in which repeated layers have no modules and weights, except those shared with other layers.

        Nothing uses these, and torch.export takes time for every module and tensor that it finds.
        """
        repeated = {repeat.path for repeat in self.repeats}
        layers = [layer for layer in self._layers.values() if layer.path in repeated]
        alone = [layer for layer in layers if all(len(self._aliases[id(t)]) == 1 for t in layer.tensors.values())]
        modules = [layer.modules[""] for layer in alone]
        tables: list[dict[str, Any]] = [kept for m in modules for kept in (m._modules, m._parameters, m._buffers)]
        saved = [(kept, dict(kept)) for kept in tables]
        for kept, _ in saved:
            kept.clear()
        try:
            yield
        finally:
            for kept, content in saved:
                kept.update(content)

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            layer = None if self._inside else self._layers.get(state_id(module))
            if layer is None:
                return forward(module, *args, **kwargs)
            try:
                given = LayerCall(args, kwargs)
            except Opaque:
                return forward(module, *args, **kwargs)
            for kind in self._kinds:
                if kind.call.description == given.description and self._alike(kind, layer):
                    return self._repeat(kind, layer, given)
            return self._trace(layer, functools.partial(forward, module), given)

        return call

    def _trace(self, layer: _Layer, forward: Callable[..., Any], given: LayerCall) -> Any:
        """Run a layer between marks."""
        number, self._marked = self._marked, self._marked + 1
        entered = enter_all(given.tensors, number)
        versions = [t._version for t in entered]
        self._inside = True
        try:
            with recorded_reads() as reads:
                outcome = given.run(forward, entered)
        finally:
            self._inside = False
        if versions != [t._version for t in entered]:
            raise NotRepeatable(f"layer {layer.path} writes to its inputs")
        if not reads.wrote:
            with contextlib.suppress(Opaque):
                pattern = leave_all(outcome, entered, number)
                written = any(t._version for t in tensors_in(outcome))
                self._kinds.append(_Kind(number, layer, given, reads, written, pattern))
                outcome = resolved(pattern, given.tensors, lambda slot, like: like)
        return given.settle(outcome)

    def _repeat(self, kind: _Kind, layer: _Layer, given: LayerCall) -> Any:
        """The results of a repeated layer, which does not run."""
        source = kind.layer
        renames = {
            f"{source.path}.{name}": f"{layer.path}.{name}"
            for name, tensor in source.tensors.items()
            if layer.tensors[name] is not tensor
        }
        pairs = enumerate(zip(given.tensors, kind.call.tensors, strict=True))
        slots = tuple(slot for slot, (mine, theirs) in pairs if mine is not theirs)
        number = len(self.repeats)
        self.repeats.append(RepeatedLayer(kind.number, source.path, layer.path, renames, slots))

        def result(slot: int, like: Tensor) -> Tensor:
            return torch.ops.icc_trace.repeated([given.tensors[i] for i in slots], like, [number], [slot])

        return given.settle(resolved(kind.outcome, given.tensors, result))

    def _alike(self, kind: _Kind, layer: _Layer) -> bool:
        source = kind.layer
        if source.structure != layer.structure:
            return False
        if not all(self._tensors_alike(t, layer.tensors[name]) for name, t in source.tensors.items()):
            return False
        twins = {id(module): layer.modules[path] for path, module in source.modules.items()}
        return all(
            same_state(kind.reads.of(module), vars(module), vars(layer.modules[path]), twins)
            for path, module in source.modules.items()
        )

    def _tensors_alike(self, a: Tensor, b: Tensor) -> bool:
        """Whether a tensor [..] may replace another: they are the same, or both are untied."""
        if a is b:
            return True
        names = [*self._aliases[id(a)], *self._aliases[id(b)]]
        if len(names) != 2:
            return False
        if a.dtype.is_floating_point:
            return True
        with _disable_current_modes():  # integers and booleans are masks and indices, which decide what is computed
            return torch.equal(*(self._weights[name].load() for name in names))
