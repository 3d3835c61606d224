"""The layouts of the CPU backend. Another package adds its own with `LAYOUTS.register`."""

from __future__ import annotations

from ....program.layout import Layout, Layouts, Role
from ....weights.formats.affine import GroupAffine
from ....weights.formats.blocks import BlockFormat
from ....weights.formats.channel import ChannelInt8
from ....weights.formats.dense import Dense
from ....weights.formats.float8 import Float8
from ....weights.formats.reduced import ReducedInt8
from ....weights.formats.tables import GroupedTable, TableFormat
from .affine import AffineTiles
from .blocks import BlockTiles
from .dense import ROWS, TILES, stored_type
from .float8 import Float8Tiles
from .reduced import ReducedTiles
from .split import SplitTiles


def _dense(form: Dense, role: Role) -> Layout:
    item = stored_type(form)
    return ROWS[item] if role == "table" else TILES[item]


def _affine(form: GroupAffine, role: Role) -> Layout:
    return SplitTiles.of(form) if role == "screen" and form.bits == 8 else AffineTiles.of(form)


LAYOUTS = Layouts(
    "CPU",
    ROWS,
    {
        Dense: _dense,
        GroupAffine: _affine,
        ChannelInt8: lambda form, role: AffineTiles.of(form),
        ReducedInt8: lambda form, role: ReducedTiles.of(form),
        **dict.fromkeys((BlockFormat, TableFormat, GroupedTable), lambda form, role: BlockTiles.of(form)),
        Float8: lambda form, role: Float8Tiles.of(form),
    },
)
