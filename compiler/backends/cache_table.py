"""Which KV formats a back end has kernels for: a table that anyone may add to, as to `Layouts` of weights."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from ...runtime.format.kv import KVLayer
from .errors import CodegenError


class CacheKind(Protocol):
    """What a back end has of a KV format: the names of types and macros that its kernels read and write it with."""

    def refusal(self, layer: KVLayer) -> str:
        """Why a layer cannot be cached so; "" if it can."""
        ...


C = TypeVar("C", bound=CacheKind)


class CacheTable(Generic[C]):
    """What one back end (named in errors) has, by the names of KV formats."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._kinds: dict[str, C] = {}

    def register(self, form: str, kind: C) -> None:
        """Add what there is of a format; ValueError if there is something else already."""
        if self._kinds.setdefault(form, kind) != kind:
            raise ValueError(f"the {self.backend} backend has something of the KV format {form!r} already")

    def refusal(self, form: str, layer: KVLayer) -> str:
        """Why no kernel caches a layer in a format; "" if kernels do."""
        found = self._kinds.get(form)
        return self._missing(form) if found is None else found.refusal(layer)

    def find(self, form: str) -> C:
        """What there is of a format; CodegenError if there is nothing."""
        if form not in self._kinds:
            raise CodegenError(self._missing(form))
        return self._kinds[form]

    def _missing(self, form: str) -> str:
        return f"the {self.backend} backend has no kernels for KV format {form!r}"
