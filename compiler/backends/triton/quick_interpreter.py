"""Triton's interpreter with less bookkeeping: the same values, types and messages in less than half of the time.

numpy takes a tenth of an interpreted kernel's time. The rest goes into building dictionaries to look up types, wrapping
the shapes of blocks in tuples of constants each time, and checking each integer sum with nine operations of the
language. This module caches the results; unusual cases go to Triton's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

_WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@lru_cache(maxsize=1)
def quicken() -> None:
    """Replace functions of Triton in this process, before the interpreter patches the language for its first kernel."""
    import triton.runtime.interpreter as interpreter
    from triton.language import core, semantic

    _share_facts_of_shapes(core)
    _compare_by_identity(core.dtype)
    _keep_numpy_types(interpreter, core.block_type)
    _keep_promotions(semantic.TritonSemantic)
    _leave_equal_shapes(semantic.TritonSemantic)
    _check_sums_in_numpy(semantic.TritonSemantic)
    _call_builtins_directly(interpreter)


def _share_facts_of_shapes(core: Any) -> None:
    """Let types of blocks of one shape, and tensors of them, share the shape and the number of elements."""
    slow_type, slow_tensor, constexpr = core.block_type.__init__, core.tensor.__init__, core.constexpr
    sequences, known = (list, core.tuple), {}

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(shape) not in sequences:
            return slow_type(self, element_ty, shape)
        key = tuple([size.value if type(size) is constexpr else size for size in shape])
        facts = known.get(key)
        if facts is None:
            slow_type(self, element_ty, shape)  # which checks the shape
            facts = {name: value for name, value in vars(self).items() if name not in ("element_ty", "name")}
            slow_tensor(of_type := object.__new__(core.tensor), None, self)
            facts["of_tensor"] = {
                name: value for name, value in vars(of_type).items() if name not in ("handle", "type", "dtype")
            }
            known[key] = facts
        self.__dict__.update(facts)
        self.element_ty = element_ty
        self.name = f"<{self.shape}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        facts = type.__dict__.get("of_tensor")
        if facts is None:
            return slow_tensor(self, handle, type)
        self.__dict__.update(facts)
        self.handle, self.type, self.dtype = handle, type, type.element_ty

    core.block_type.__init__, core.tensor.__init__ = make_type, make_tensor
    core.block_type.to_ir = lambda self, builder: self  # the interpreter's types of the IR are those of the language


def _compare_by_identity(dtype: Any) -> None:
    """Compare types by identity first: most types that are compared are the same object."""
    slow = dtype.__eq__

    def equal(self: Any, other: Any) -> bool:
        return self is other or (self.name == other.name if type(other) is dtype else slow(self, other))

    dtype.__eq__ = equal


def _keep_numpy_types(interpreter: Any, block_type: Any) -> None:
    """Cache in each scalar type its numpy type, and check by its width whether values fit."""
    slow_type, slow_fits = interpreter._get_np_dtype, interpreter._validate_np_data_size

    def numpy_type(kind: Any) -> np.dtype:
        if type(kind) is block_type:
            kind = kind.element_ty
        found = kind.__dict__.get("of_numpy")
        if found is None:
            found = kind.of_numpy = slow_type(kind)
        return found

    def fits(array: np.ndarray, kind: Any) -> bool:
        bits = kind.__dict__.get("primitive_bitwidth")
        return slow_fits(array, kind) if bits is None else array.itemsize * 8 <= max(bits, 8)

    interpreter._get_np_dtype, interpreter._validate_np_data_size = numpy_type, fits


def _keep_promotions(semantic: Any) -> None:
    """Cache promotions: two types are promoted to the same type each time."""
    slow, known = semantic.computation_type_impl, {}

    def promoted(self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_scalar, b.name, b_scalar, div_or_mod
        found = known.get(key)
        if found is None:
            found = known[key] = slow(self, a, a_scalar, b, b_scalar, div_or_mod)
        return found

    semantic.computation_type_impl = promoted


def _leave_equal_shapes(semantic: Any) -> None:
    """Do not broadcast two scalars, or blocks that share their shape."""
    slow = semantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        shape = lhs.type.__dict__.get("shape")
        return (lhs, rhs) if shape is rhs.type.__dict__.get("shape") else slow(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast


def _check_sums_in_numpy(semantic: Any) -> None:
    """Check integer overflow with three calls of numpy. Triton's own check finds nothing here: its assertion exists
    only in kernels that are compiled for debugging."""

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> None:
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        exact = _WIDE[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        if exact.min() < kind.get_int_min_value() or exact.max() > kind.get_int_max_value():
            raise OverflowError(f"{kind} overflow detected for operation {binary_op.__name__}")

    semantic.binary_op_sanitize_overflow_impl = check


def _call_builtins_directly(interpreter: Any) -> None:
    """Pass the interpreter's semantic to the language's functions directly, without two wrappers that inspect
    arguments."""
    semantic = interpreter.interpreter_semantic

    def patch(target: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        (scope[0].set_attr if scope else setattr)(target, name, call)

    interpreter._patch_attr = patch
