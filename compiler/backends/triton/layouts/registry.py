"""The layouts of the Triton backend; dense weights are rows, as the CPU packs them.

Another package adds its own with `LAYOUTS.register`.
"""

from __future__ import annotations

from ....program.layout import Layouts
from ....weights.formats.affine import GroupAffine
from ....weights.formats.blocks import BlockFormat
from ....weights.formats.channel import ChannelInt8
from ....weights.formats.dense import Dense
from ....weights.formats.float8 import Float8
from ....weights.formats.tables import GroupedTable, TableFormat
from ...cpu.layouts.dense import ROWS, stored_type
from .affine import AffineGroups
from .blocks import BlockRows
from .float8 import Float8Rows
from .int8 import Int8Rows

LAYOUTS = Layouts(
    "Triton",
    ROWS,
    {
        Dense: lambda form, role: ROWS[stored_type(form)],
        GroupAffine: lambda form, role: AffineGroups.of(form),
        ChannelInt8: lambda form, role: Int8Rows.of(form),
        **dict.fromkeys((BlockFormat, TableFormat, GroupedTable), lambda form, role: BlockRows.of(form)),
        Float8: lambda form, role: Float8Rows.of(form),
    },
)
