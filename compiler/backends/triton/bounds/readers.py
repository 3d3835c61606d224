"""The forms of results of operations other than arithmetic; None if nothing is known of a result."""

from __future__ import annotations

import numpy as np

from .forms import Form, least, most
from .ttir import TtirOp
from .values import MOVING, PASSING, KernelValues, Reader, UnclearError, View, own_view, whole_range


def _constant(known: KernelValues, op: TtirOp, name: str, view: View) -> Form | None:
    found = op.constant
    return None if found is None else Form(found)


def _place(known: KernelValues, op: TtirOp, name: str, view: View) -> Form | None:
    axis = "xyz".index(op.text.split()[0])
    return Form((known.samples.place if op.name == "tt.get_program_id" else known.samples.grid)[axis])


def _lanes(known: KernelValues, op: TtirOp, name: str, view: View) -> Form | None:
    start, end = op.attribute("start"), op.attribute("end")
    return known.unknown((name, view), start, end - 1) if end - start > 1 else Form(start)


def _alike(known: KernelValues, op: TtirOp, name: str, view: View) -> Form | None:
    if op.name == "arith.extsi" and known.types[op.operands[0]].element == "i1":
        return known.unknown((name, view), -1, 0)
    return known.form(*known.operand_views(op, view)[0])


def _narrowed(known: KernelValues, op: TtirOp, name: str, view: View) -> Form | None:
    form, (low, high) = known.form(*known.operand_views(op, view)[0]), whole_range(known.types[name])
    return form if np.all(form.low >= low) and np.all(form.high <= high) else None


def _unsigned(known: KernelValues, op: TtirOp, name: str, view: View) -> Form | None:
    source = known.types[op.operands[0]]
    if source.element == "i1":
        return known.unknown((name, view), 0, 1)
    form = known.form(*known.operand_views(op, view)[0])
    return form if np.all(form.low >= 0) else known.unknown((name, view), 0, 2**source.bits - 1)


def _loaded(known: KernelValues, op: TtirOp, name: str, view: View) -> Form | None:
    """The form of a loaded number: it lies between the bounds that `Memory` gives for its argument."""
    try:
        root, _ = known.pointer(op.operands[0], view)
    except UnclearError:
        return None
    memory = known.memory[root]
    if memory.low is None or memory.high is None or known.types[name].bits < 32:
        return None
    low, high = memory.low, memory.high
    if len(op.operands) == 3:  # the mask, and the value of masked elements
        other = known.form(op.operands[2], view)
        low, high = least(low, other.low), most(high, other.high)
    return known.unknown((name, view), low, high)


def _chosen(known: KernelValues, op: TtirOp, name: str, view: View) -> Form | None:
    (condition, place), one, other = known.operand_views(op, view)
    return known.either((name, view), condition, place, known.form(*one), known.form(*other))


def _anywhere(known: KernelValues, op: TtirOp, name: str, view: View) -> Form | None:
    """Elements in another order: between the least and the largest of all operands."""
    views = known.operand_views(op, view)
    forms = [known.form(*operand) for operand in views[: 1 if op.name == "tt.gather" else None]]
    low, high = forms[0].low, forms[0].high
    for form in forms[1:]:
        low, high = least(low, form.low), most(high, form.high)
    return known.unknown((name, view), low, high)


def _reduced(known: KernelValues, op: TtirOp, name: str, view: View) -> Form | None:
    """Reductions by sum, minimum and maximum."""
    source = op.operands[op.results.index(name)] if len(op.results) > 1 else op.operands[0]
    if not known.integer(source):
        return None
    form = known.form(source, own_view(known.types[source], source))
    inner = {inside.name for block in op.regions[0] for inside in block.ops}
    if "arith.addi" in inner and len(inner) == 2:
        return _summed(known, op, name, view, source, form)
    picks = inner & {"arith.minsi", "arith.maxsi", "arith.select", "arith.ori", "arith.andi"}
    return known.unknown((name, view), form.low, form.high) if picks else None


def _summed(known: KernelValues, op: TtirOp, name: str, view: View, source: str, form: Form) -> Form:
    axis = op.attribute("axis")
    if op.name == "tt.reduce" and _one_hot(known, source):
        return known.unknown((name, view), form.low, form.high)
    count = known.types[source].shape[axis]
    low, high = least(count * form.low, form.low), most(count * form.high, form.high)
    if op.name == "tt.reduce" or np.any(form.low < 0):
        return known.unknown((name, view), low, high)
    found, own = known.unknown((name, view), form.low, high), known.form(source, view)
    totals = [total for total in known.sums.get(source, ()) if known.ops[total].attribute("axis") == axis]
    [unknown] = found.terms
    unknown.facts = [own.plus(found, -1)]  # between the last term and the sum of all
    unknown.facts += [found.plus(known.form(t, view[:axis] + view[axis + 1 :]), -1) for t in totals]
    return found


def _one_hot(known: KernelValues, name: str) -> bool:
    """Whether all elements of a value but one are 0, as in where(position == one, .., 0)."""
    choice = known.ops.get(name)
    if choice is None or choice.name != "arith.select" or len(known.types[name].shape) != 1:
        return False
    zero = known.ops.get(choice.operands[2])
    if zero is None or zero.constant != 0:
        return False
    waiting = [choice.operands[0]]
    while waiting:
        op = known.ops.get(waiting.pop())
        if op is not None and op.name == "arith.andi":
            waiting += op.operands
        elif op is not None and op.name == "arith.cmpi" and op.text.strip().startswith("eq"):
            sides = {made.name for side in op.operands if (made := known.ops.get(side))}
            if sides >= {"tt.make_range", "tt.splat"}:
                return True
    return False


READERS: dict[str, Reader] = {
    "arith.constant": _constant, "tt.get_program_id": _place, "tt.get_num_programs": _place,
    "tt.make_range": _lanes, "arith.trunci": _narrowed, "arith.extui": _unsigned,
    "tt.load": _loaded, "arith.select": _chosen, "tt.reduce": _reduced, "tt.scan": _reduced,
    **dict.fromkeys(PASSING, _alike), **dict.fromkeys(MOVING, _anywhere),
}  # fmt: skip
