"""Whether an adapter fits an engine's adapter slots, and its A, B and vectors in the engine's form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..errors import RequestError
from ..format.adapters import MAX_RANK, AdapterPlan, AdapterSite
from .adapter import Adapter, Change, LowRank, RowChange
from .base_weights import BaseWeights

_LEFT_OUT = {"whole": "a whole weight (modules_to_save)", "start": "a base that was changed first (PiSSA, OLoRA)"}
_UNREAD = "icc cannot read its weight, which lies in another order"
_ROWS = 1024  # rows of a weight that are read at a time


@dataclass(frozen=True)
class Applied:
    """The change of one site, for the weight as the engine stores it.

    a [.., r, k], b [.., n, r]: y += b (a x). bias [n] is added, too; gain [n]: the layer's own output is multiplied by
    1 + gain. bias and gain are None if the adapter has none. All float32.
    """

    a: np.ndarray
    b: np.ndarray
    bias: np.ndarray | None = None
    gain: np.ndarray | None = None


def check_fits(plan: AdapterPlan, called: str, adapter: Adapter, base: BaseWeights) -> None:
    """Raise RequestError for the first change that the engine has no room for: a layer without room, a rank that is too
    large, another shape, or a kind of change that the engine cannot compute beside its own weights."""
    sites = {site.parameter: site for site in plan.sites}
    changes = spread(plan, adapter.changes, base)
    idle = idle_without_room(plan, adapter)
    for name, change in changes.items():
        site = sites.get(name)
        if name in idle and len(idle) < len(changes):
            continue
        if problem := _problem(plan, site, change, base):
            hint = f"merge it when the model is compiled (--lora){_other_room(site, change)}"
            raise RequestError(f"adapter {called} ({adapter.path}): {name}: {problem}", hint, field="adapter")


def idle_without_room(plan: AdapterPlan, adapter: Adapter) -> list[str]:
    """The names of weights for which an engine has no room and needs none, because their B is zero: for example an
    encoder's pooler, if the training used another pooling."""
    known = {site.parameter for site in plan.sites}
    return [name for name, change in adapter.changes.items() if name not in known and change.is_idle]


def check_invocation(vocab_size: int, called: str, adapter: Adapter) -> None:
    """Raise RequestError for an aLoRA that could never be active: no prompt can have its invocation tokens. vocab_size:
    0 if it is not known."""
    wrong = next((one for one in adapter.invocation if one < 0 or (vocab_size and one >= vocab_size)), None)
    if wrong is not None:
        raise RequestError(
            f"adapter {called} ({adapter.path}): alora_invocation_tokens has {wrong}, which is no token of the "
            f"vocabulary of {vocab_size}",
            "it was trained for another model, or one with more tokens",
            field="adapter",
        )


def _other_room(site: AdapterSite | None, change: Change) -> str:
    """A hint which room could be compiled for a change that the engine has no room for; "" if none could."""
    if change.start is not None or (site is not None and site.table and change.magnitude is not None):
        return ""
    if change.whole is None or site is None:
        return ", or compile with the room that it needs (--adapters)"
    fits = site.n <= MAX_RANK and not site.experts  # each of its rows is a change of rank 1
    return f", or compile with room for rank {site.n}, which is one for each of its rows (--adapters)" if fits else ""


def spread(plan: AdapterPlan, changes: Mapping[str, Change], base: BaseWeights) -> Mapping[str, Change]:
    """The changes, rewritten: a whole embedding or head becomes the rows that differ from the model's, if these can be
    found and are few; a new bias becomes its difference from the model's; a change of rows of an embedding also applies
    to the LM head that is the same matrix."""
    found = dict(changes)
    for site in plan.sites:
        change, called = found.get(site.parameter), f"{site.parameter.removesuffix('.weight')}.bias"
        if change is not None and change.whole is not None:
            found[site.parameter] = change = _by_rows(plan, site, change, base)
        other = found.get(called)
        if other is not None and site.bias and other.whole is not None and other.whole.shape == (site.n,):
            del found[called]
            change = change or Change()
            added = other.whole - _own_bias(site, base)
            found[site.parameter] = replace(change, bias=added if change.bias is None else change.bias + added)
    for site in plan.sites:
        change, before = found.get(site.parameter), changes.get(site.parameter)
        alone = before is None or (before.whole is not None and not before.frozen)  # PEFT does not tie a trained copy
        if site.table and site.tied and change is not None and change.rows is not None and not alone:
            found[site.tied] = replace(found.get(site.tied, Change()), rows=change.rows)
    return found


def _by_rows(plan: AdapterPlan, site: AdapterSite, change: Change, base: BaseWeights) -> Change:
    """A change of a whole weight as a change of rows, if that is possible; else as it is."""
    whole = change.whole
    assert whole is not None
    if change.rows is not None or whole.shape != (site.n, site.k) or site.rows:
        return change
    columns = base.vector(site.columns) if site.columns else 1.0
    ids = base.differing(site, whole, change.frozen, columns)
    if ids is None or len(ids) > plan.rank:
        return change
    rows = RowChange(tuple(ids.tolist()), whole[ids]) if len(ids) else None
    return replace(change, whole=None, rows=rows)


def _problem(plan: AdapterPlan, site: AdapterSite | None, change: Change, base: BaseWeights) -> str:
    if site is None:
        return "the engine has no room for adapters there"
    for field, words in _LEFT_OUT.items():
        if getattr(change, field) is not None:
            return f"the engine cannot compute with {words} beside its own weights"
    if change.bias is not None and not site.bias:
        return "the engine has no room for a bias there"
    if problem := _rows_problem(site, change.rows, base) or _magnitude_problem(site, change, base):
        return problem
    rank = 0 if change.rows is None else len(change.rows.ids)
    if (low := change.low_rank) is not None:
        a, b = low.a.shape, low.b.shape
        experts = (site.experts,) if site.experts else ()
        if a[:-2] != experts or b[:-2] != experts or (b[-2], a[-1]) != (site.n, site.k) or a[-2] != b[-1]:
            return f"A {list(a)} and B {list(b)} do not fit a weight of {[*experts, site.n, site.k]}"
        rank += low.rank
    what = "its rank" if change.rows is None else "its rank, with one for each trained token,"
    return "" if rank <= plan.rank else f"{what} is {rank}, the engine has room for {plan.rank}"


def _rows_problem(site: AdapterSite, rows: RowChange | None, base: BaseWeights) -> str:
    if rows is None:
        return ""
    if rows.values.shape[1] != site.k or max(rows.ids, default=0) >= site.n:
        return f"rows {list(rows.values.shape)} up to {max(rows.ids, default=0)} are not of {[site.n, site.k]}"
    return "" if base.readable(site.base) else _unreadable(site, base)


def _magnitude_problem(site: AdapterSite, change: Change, base: BaseWeights) -> str:
    if change.magnitude is None:
        return ""
    if site.table:
        return "the engine cannot compute with magnitudes of an embedding (DoRA) beside its own weights"
    if not site.gain:
        return "the engine has no room for a magnitude per row (DoRA): --adapters 8x16+dora makes some"
    if change.magnitude.size != site.n:
        return f"it has {change.magnitude.size} magnitudes for a weight of {[site.n, site.k]}"
    return "" if base.readable(site.base) else _unreadable(site, base)


def _unreadable(site: AdapterSite, base: BaseWeights) -> str:
    found = base.format(site.base)
    return f"its weight is stored as {found}, of which icc cannot read rows" if found else _UNREAD


def applied(
    plan: AdapterPlan, adapter: Adapter, base: BaseWeights, scale: float
) -> Iterator[tuple[AdapterSite, Applied]]:
    """The change of every site that an adapter changes, times `scale`. The adapter must fit, see `check_fits`."""
    changes = spread(plan, adapter.changes, base)
    for site in plan.sites:
        change = changes.get(site.parameter)
        if change is not None:
            yield site, _of_engine(site, _applied(site, change, base, scale), base)


def _applied(site: AdapterSite, change: Change, base: BaseWeights, scale: float) -> Applied:
    """The change of a site, for the weight as the original model has it."""
    experts = (site.experts,) if site.experts else ()
    a, b = np.zeros((*experts, 0, site.k), np.float32), np.zeros((*experts, site.n, 0), np.float32)
    if (low := change.low_rank) is not None:
        a, b = low.a.astype(np.float32, copy=False), low.b * np.float32(low.scale * scale)
    bias = None if change.bias is None else change.bias * np.float32(scale)
    if (rows := change.rows) is not None:  # each is a change of rank 1
        old = np.concatenate([_base_rows(site, base, token, 1) for token in rows.ids])
        one_hot = np.zeros((site.n, len(rows.ids)), np.float32)
        one_hot[list(rows.ids), np.arange(len(rows.ids))] = scale
        a, b = np.concatenate([a, rows.values - old]), np.concatenate([b, one_hot], axis=1)
    if change.magnitude is None:
        return Applied(a, b, bias)
    factor = _factor(site, base, change.magnitude, LowRank(a, b, 1.0))
    kept = (1 - factor) * _own_bias(site, base)  # the magnitude is the weight's, and no bias is scaled by it
    return Applied(a, b * factor[:, None], kept if bias is None else bias + kept, factor - 1)


def _factor(site: AdapterSite, base: BaseWeights, magnitude: np.ndarray, change: LowRank) -> np.ndarray:
    """magnitude / |W + B A| of each row (DoRA, Liu et al. 2024, arXiv:2402.09353, equation 5)."""
    norms = np.empty(site.n, np.float32)
    for first in range(0, site.n, _ROWS):
        count = min(_ROWS, site.n - first)
        here = slice(first, first + count)
        norms[here] = np.linalg.norm(_base_rows(site, base, first, count) + change.b[here] @ change.a, axis=1)
    return np.divide(magnitude, norms, out=np.ones_like(norms), where=norms > 0)


def _base_rows(site: AdapterSite, base: BaseWeights, first: int, count: int) -> np.ndarray:
    """Rows of the original model's weight, float32 [count, k]: the engine's factors are divided out."""
    found = base.of_site(site, first, count)
    if site.columns:
        found = found / base.vector(site.columns)
    return found / base.vector(site.rows)[first : first + count, None] if site.rows else found


def _own_bias(site: AdapterSite, base: BaseWeights) -> np.ndarray:
    """The bias of the original model's layer, float32 [n]: the engine's factors are divided out."""
    own = base.vector(site.base_bias) if site.base_bias else np.zeros(site.n, np.float32)
    return own / base.vector(site.rows) if site.rows else own


def _of_engine(site: AdapterSite, change: Applied, base: BaseWeights) -> Applied:
    """The change, for the weight as the engine stores it: multiplied by the factors of its columns and rows."""
    if site.columns:
        change = replace(change, a=change.a * base.vector(site.columns))
    if site.rows:
        rows = base.vector(site.rows)
        bias = None if change.bias is None else change.bias * rows
        change = replace(change, b=change.b * rows[:, None], bias=bias)
    return change
