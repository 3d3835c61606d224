"""How a back end lays out the weights of one storage format in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from ..errors import IccError, UnsupportedModel
from ..weights.formats.base import StorageFormat
from ..weights.formats.dense import Dense
from ..weights.formats.registry import find_format

Role = Literal["plain", "product", "screen", "table"]
"""The reader of a weight, which decides its layout.

plain: vectors, constants and the matrices of bmm, as rows of f32 or i32.
product: linear layers, and embeddings that are one matrix with a linear layer.
screen: the linear layer that gives the logits, if the largest may be found from a part of its codes.
table: an embedding that nothing else reads.
"""


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step's description of a weight's form in memory: its storage format and its role. The back end's `Layouts` find
    the layout.
    """

    format: str
    role: Role

    @property
    def storage(self) -> StorageFormat:
        """The format with that name; UsageError if there is none."""
        return find_format(self.format)


Arrays = Mapping[str, np.ndarray]
"""The parts of a weight (see `StorageFormat.arrays`) as numpy arrays; bf16 as its bits, uint16."""


@dataclass(frozen=True)
class Layout(ABC):
    """One storage format in the memory of one back end.

    name: the name that weights of a program use. format: the format that it stores; a dense layout converts any float
    weight. coded: whether products multiply with codes, not with values. int8_rows: whether they read their rows as
    int8, with a scale per block of the format. screens: whether products with it can first read only a part of the
    codes. tile: how many rows of dense matrices [N, K] are stored together: [N / tile, K, tile].
    """

    name: str
    format: StorageFormat
    coded: ClassVar[bool] = False
    int8_rows: ClassVar[bool] = False
    screens: ClassVar[bool] = False
    tile: ClassVar[int] = 1

    @abstractmethod
    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a weight of `shape`, a multiple of 64."""

    @abstractmethod
    def pack(self, parts: Arrays) -> np.ndarray:
        """The bytes of a weight, uint8 of `nbytes` of its shape; ValueError for a shape that the layout cannot hold."""

    @abstractmethod
    def unpack(self, packed: np.ndarray, shape: Sequence[int]) -> dict[str, np.ndarray]:
        """The parts of a weight of `shape` as kernels read them: codes unchanged, scales as stored. packed: the result
        of `pack`."""


class MatrixLayout(Layout):
    """A layout of matrices [N, K] in groups along K; experts [E, N, K] follow one another."""

    @property
    def group(self) -> int:
        """Values along K that share a scale and the other values beside the codes."""
        return self.format.block[1]

    def misfit(self, n: int, k: int) -> str:
        """Why a matrix cannot be stored in this layout; "" if it can."""
        if self.group % 16 or k % self.group:
            return f"group {self.group} must be a multiple of 16 that divides K = {k}"
        return ""

    @abstractmethod
    def matrix_nbytes(self, n: int, k: int) -> int:
        """Bytes of one matrix: the distance of experts."""

    @abstractmethod
    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        """As `pack`, of one matrix."""

    @abstractmethod
    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        """As `unpack`, of one matrix [n, k]."""

    def nbytes(self, shape: Sequence[int]) -> int:
        *experts, n, k = shape
        return prod(experts) * self.matrix_nbytes(n, k)

    def pack(self, parts: Arrays) -> np.ndarray:
        first = next(iter(parts.values()))
        if first.ndim == 2:
            return self.pack_matrix(parts)
        experts = ({name: value[e] for name, value in parts.items()} for e in range(len(first)))
        return np.concatenate([self.pack(expert) for expert in experts])

    def unpack(self, packed: np.ndarray, shape: Sequence[int]) -> dict[str, np.ndarray]:
        if len(shape) == 2:
            return self.unpack_matrix(packed, *shape)
        found = [self.unpack(piece, shape[1:]) for piece in np.split(packed, shape[0])]
        return {name: np.stack([parts[name] for parts in found]) for name in found[0]}


LayoutMaker = Callable[[Any, Role], Layout]


@dataclass
class Layouts:
    """The layouts of one back end: `plain` ones by element type, and for each class of formats the function that makes
    its layouts."""

    backend: str
    plain: Mapping[str, Layout]
    makers: dict[type[StorageFormat], LayoutMaker]

    def register(self, form: type[StorageFormat], make: LayoutMaker) -> None:
        """Add the layouts of a class of formats: `make(format, role)`."""
        self.makers[form] = make

    def find(self, form: StorageFormat, role: Role) -> Layout:
        """The layout of a format for a role; plain weights become f32 or i32. UnsupportedModel names a format that the
        back end lacks."""
        if role == "plain":
            return self.plain["i32" if isinstance(form, Dense) and not form.dtype.is_floating_point else "f32"]
        make = self.makers.get(type(form))
        if make is None:
            raise UnsupportedModel(f"the {self.backend} backend has no layout for weights stored as {form.name}")
        return make(form, role)

    def of(self, stored: Stored) -> Any:
        """The layout of a step's weight, of a kind that `refusal` checks. IccError if the format or layout is
        missing."""
        return self.find(stored.storage, stored.role)

    def refusal(self, stored: Stored, kind: type[Layout]) -> str:
        """Why `of` does not give a layout of that kind; "" if it does."""
        try:
            found = self.of(stored)
        except IccError as error:
            return str(error)
        return "" if isinstance(found, kind) else f"weights stored as {stored.format} are not for this kernel"
