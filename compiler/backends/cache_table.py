"""The KV formats that a back end has kernels for: a table that other packages may add to, like `Layouts` of weights."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from ...runtime.format.kv import KVLayer
from .errors import CodegenError


class CacheKind(Protocol):
    """A back end's support of a KV format: the names of types and macros with which its kernels read and write it."""

    def refusal(self, layer: KVLayer) -> str:
        """Why a layer cannot be cached in this format; "" if it can."""
        ...


C = TypeVar("C", bound=CacheKind)


class CacheTable(Generic[C]):
    """The cache kinds of one back end (which errors name), by the names of their KV formats."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._kinds: dict[str, C] = {}

    def register(self, form: str, kind: C) -> None:
        """Add the kind of a format; ValueError if the format already has another kind."""
        if self._kinds.setdefault(form, kind) != kind:
            raise ValueError(f"the {self.backend} backend has something of the KV format {form!r} already")

    def refusal(self, form: str, layer: KVLayer) -> str:
        """Why no kernel caches a layer in a format; "" if kernels do."""
        found = self._kinds.get(form)
        return self._missing(form) if found is None else found.refusal(layer)

    def find(self, form: str) -> C:
        """The kind of a format; CodegenError if the back end has none."""
        if form not in self._kinds:
            raise CodegenError(self._missing(form))
        return self._kinds[form]

    def _missing(self, form: str) -> str:
        return f"the {self.backend} backend has no kernels for KV format {form!r}"
