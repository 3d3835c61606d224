"""Tilings of the attention kernels: the candidates, and estimates of their times from the target's table.

The constants are estimates from the instruction counts of compiled kernels; tuned entries replace them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....targets import Target
from .choice import Config, Tuner, power_of_two

MOST_SPLITS = 64  # programs that share the keys of a sequence
_CLOCK = 1.6e9  # Hz, for all targets under load
_LANES = 128  # float32 operations per clock and multiprocessor
_LATENCY = 1e-6  # seconds from the request of a tile to its arrival on a busy device
_LAUNCH = 2e-6  # seconds that each additional kernel of a step costs
_SHORT = 512  # tokens of a step whose prompts are short
_BLOCK = 1.5e-9  # seconds per block that is launched without work, over the whole device


@dataclass(frozen=True)
class Workload:
    """The sizes that decide the tiling: heads, dims with their padding, bytes of a cached element (a fraction if codes
    are packed) and of a multiplied one. shared: values are the beginning of keys."""

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    cached: float
    multiplied: int
    block_size: int
    shared: bool = False

    @property
    def read(self) -> int:
        """Elements that are read from the cache per key."""
        return self.key_dim + (0 if self.shared else self.value_dim)

    @property
    def key(self) -> str:
        """Names the layer in tuning files."""
        dims = f"{self.kv_heads}x{self.group}_d{self.key_dim}_{self.value_dim}"
        return f"{dims}_e{self.cached}_{self.multiplied}_b{self.block_size}{'_shared' if self.shared else ''}"


@dataclass(frozen=True)
class AttentionTiling:
    """See AttentionSource for rows, heads, tile and widest."""

    rows: int
    heads: int
    tile: int
    widest: int
    warps: int
    stages: int


def mixed_tiling(work: Workload, max_tokens: int, tuner: Tuner) -> AttentionTiling:
    """The tiling for steps that mix prompts and decodes. Tiny, short and long steps differ: in a short one, most of a
    tile of many keys is masked (for 64 tokens of 8 x 4 heads of 64 on an H100, 128 rows and keys took twice the time of
    64)."""
    size = "few" if max_tokens * work.group <= 64 else "many" if max_tokens <= _SHORT else "long"
    long = work.multiplied == 4  # products of float32 are unrolled into registers
    candidates: list[Config] = [
        {"rows": rows, "heads": heads, "tile": tile, "warps": warps, "stages": stages}
        for rows in ((32,) if long else (128, 64) if size == "long" else (64,))
        for heads in _head_counts(work.group, rows)
        for tile in ((16,) if long else (*_tiles(work), *_short_tile(work, tuner.target)))
        if size == "long" or tile <= 64
        for warps in ((8,) if long else (4, 8))
        for stages in (2, 3)
        if work.cached >= 1 or long or rows <= 16 * warps  # unpacking takes registers too
    ]
    key = f"attention_mixed_{work.key}_{size}"
    best = tuner.pick(key, candidates, lambda config: _mixed_cost(work, tuner.target, config))
    return AttentionTiling(widest=_widest(work, tuner.target, best["rows"]), **best)


def decode_tiling(work: Workload, tuner: Tuner) -> AttentionTiling:
    """The tiling for steps of one token per sequence. It is the same for any number of sequences, so that they share an
    object."""
    long = work.multiplied == 4
    candidates: list[Config] = [
        {"rows": max(power_of_two(heads), 16), "heads": heads, "tile": tile, "warps": warps, "stages": stages}
        for heads in _head_counts(work.group, 16 if long else 32 if work.value_dim > 256 else 64)
        for tile in ((16,) if long else (*_decode_tiles(work), *_short_tile(work, tuner.target)))
        for warps in ((4, 8) if work.value_dim > 256 and not long else (4,))
        for stages in (3, 4, 2)
    ]
    best = tuner.pick(
        f"attention_decode_{work.key}", candidates, lambda config: _decode_cost(work, tuner.target, config)
    )
    return AttentionTiling(widest=256, **best)


def split_count(
    work: Workload, tiling: AttentionTiling, sequences: int, span: int, tuner: Tuner, decode: bool = True
) -> int:
    """How many programs share the keys of a sequence, of which a query sees at most `span`. decode: the last program
    merges their results; else another kernel does."""
    candidates: list[Config] = [
        {"splits": n} for n in (1, 2, 4, 8, 16, 32, MOST_SPLITS) if n == 1 or n * tiling.tile < 2 * span
    ]
    return tuner.pick(
        f"attention_splits_{work.key}_s{span}_n{sequences}", candidates,
        lambda config: _split_cost(work, tiling, sequences, span, tuner.target, config["splits"], decode),
    )["splits"]  # fmt: skip


def _tiles(work: Workload) -> tuple[int, ...]:
    """Keys per step: fewer if they are converted, and still fewer if they are unpacked, or registers spill; but at
    least 32 if unpacked (objects/operands.py)."""
    return (32,) if work.cached < 1 else (64, 32, 16) if work.cached < work.multiplied else (64, 32, 128)


def _decode_tiles(work: Workload) -> tuple[int, ...]:
    """Keys per step of a decode. If keys are codes, all warps convert a piece of 16 dims: 64 keys of it would spill
    registers."""
    if work.cached == work.multiplied:
        return (64, 32)
    return (32,) if work.key_dim % 32 or work.value_dim % 32 else (32, 64)


def _short_tile(work: Workload, target: Target) -> tuple[int, ...]:
    """Fewer keys per step, as operands of WMMA take more registers."""
    return (16,) if target.rdna and work.cached >= 1 and work.multiplied == 2 else ()


def _wmma_registers(work: Workload, target: Target, config: Config) -> float:
    """Registers per thread of a kernel that multiplies by WMMA, fitted to compiled kernels of 128 dims: LLVM loads the
    fragments of the queries and of a whole tile of keys before it multiplies."""
    dims = work.key_dim / 16 * target.fragment_registers
    queries = max(config["rows"] / (16 * config["warps"]), 1) * dims
    sums = config["rows"] * work.value_dim / (config["warps"] * target.warp_size)
    return 9 * target.fragment_registers + queries + config["tile"] / 16 * (dims + 14) + sums


def _spilled(work: Workload, target: Target, config: Config) -> float:
    """The factor by which registers that are spilled on RDNA slow a kernel, a guess: 2 for 50 of them."""
    if not target.rdna or work.multiplied != 2:
        return 1.0
    return 1 + max(0.0, _wmma_registers(work, target, config) - 250) / 50


def _head_counts(group: int, most: int) -> list[int]:
    """Ways to share the query heads of a KV head between programs: as few programs as possible, or up to twice that."""
    least = -(-group // most)
    return sorted({-(-group // parts) for parts in range(least, 2 * least + 1)}, reverse=True)


def _wide(work: Workload, target: Target) -> bool:
    """Whether products read their operands from shared memory (wgmma and later), in tiles of 64 rows and more."""
    return target.arch in ("sm_90", "sm_100") and work.multiplied == 2


def _widest(work: Workload, target: Target, rows: int) -> int:
    """The widest product: if it were wider than high, warps would divide its columns, and a row would cross warps."""
    return 256 if _wide(work, target) or target.backend == "hip" else min(rows, 128)


def _shared_bytes(work: Workload, target: Target, config: Config) -> int:
    wide = _wide(work, target) and config["rows"] >= 64
    buffers = config["stages"] if wide else config["stages"] - 1
    dims = work.read
    converted = work.multiplied if work.cached != work.multiplied else 0
    queries = config["rows"] * work.key_dim * work.multiplied
    tiles = config["tile"] * dims * (buffers * work.cached + converted)
    return int(max(queries, tiles) if target.backend == "hip" else queries + tiles) + (
        0 if wide and not converted else 2048
    )


def _blocks(work: Workload, target: Target, config: Config, registers: float) -> int:
    """Resident blocks per multiprocessor; 0 if not even one fits."""
    room, reserved = target.shared_memory_kib * 1024, target.reserved_shared
    if _shared_bytes(work, target, config) > room:
        return 0
    threads = config["warps"] * target.warp_size
    by_registers = 65536 // int(min(max(registers, 32), 255) * threads) if target.backend == "cuda" else 2
    held = (room + reserved) // (_shared_bytes(work, target, config) + reserved)
    return min(held, by_registers, target.max_warps // config["warps"], 8)


def _converted_registers(work: Workload, target: Target, config: Config) -> float:
    """Registers that hold a converted tile of codes: each warp needs the whole tile unless it is in shared memory."""
    if work.cached == work.multiplied:
        return 0.0
    pairs = config["tile"] * max(work.key_dim, work.value_dim) / 2
    return 2 * pairs / (config["warps"] * target.warp_size) if _wide(work, target) else pairs / target.warp_size


def _mixed_cost(work: Workload, target: Target, config: Config) -> float:
    """Seconds per useful row and key on one multiprocessor."""
    rows, tile, threads = config["rows"], config["tile"], config["warps"] * target.warp_size
    held = 70 if not _wide(work, target) else {256: 70}.get(work.value_dim, 100 if work.value_dim < 256 else 130)
    registers = held + rows * (work.value_dim + 1.5 * tile) / threads + _converted_registers(work, target, config)
    hoisted = 0 if _wide(work, target) else rows * work.key_dim / 2 / threads  # queries, if registers suffice
    blocks = _blocks(work, target, config, registers)
    shared = _wide(work, target) and work.value_dim > 256  # then two groups of warps may share rows and divide columns
    idle = work.multiplied == 2 and rows < 16 * config["warps"] // (1 + shared)  # a warp multiplies at least 16 rows
    if blocks == 0 or idle or (target.backend == "cuda" and registers > 400):
        return float("inf")
    used = rows // config["heads"] * work.group / -(-work.group // config["heads"])
    flops = 2 * rows * tile * (work.key_dim + work.value_dim)
    roof = target.roofline(share=0.7)
    if work.multiplied != 2:  # on ordinary units
        roof = replace(roof, rate=0.7 * (target.multiprocessors * _LANES * 2 * _CLOCK))
    products = roof.among(target.multiprocessors).arithmetic_seconds(flops)
    if target.arch == "sm_100" and rows < 128:
        products *= 2  # half of its matrix units' rows
    softmax = rows * (8 * tile + work.value_dim) / (_LANES * _CLOCK)
    exposed = 0.3e-6 + (0 if config["stages"] > 2 else 0.25e-6 if _wide(work, target) else _LATENCY)
    if tile > rows and not _wide(work, target):
        exposed += 0.5e-6  # the maxima of scores are exchanged between warps
    crowded = max(0.0, registers + hoisted - 255) / 50 if target.backend == "cuda" else 0
    if _wide(work, target) and tile > 64:
        exposed *= tile / 64  # one wait is for that many scores
    if _wide(work, target):  # while one block's warps compute softmax, another's keep the matrix units busy
        return (products + (0.6 * softmax + exposed) / blocks) / (used * tile) * (1 + crowded)
    slower = (1 + crowded) * _spilled(work, target, config)
    return (products + 0.6 * softmax + exposed / blocks) / (used * tile) * slower


def _tile_seconds(tiling: Config | AttentionTiling, block_size: int) -> float:
    """Seconds of one step of a decode kernel's loop, mostly waits at barriers and for shared memory."""
    tile = tiling["tile"] if isinstance(tiling, dict) else tiling.tile
    return 0.4e-6 + tile * 4.5e-9 + (0 if block_size % tile == 0 else 0.1e-6)


def _decode_cost(work: Workload, target: Target, config: Config) -> float:
    """Seconds per key and query head on one multiprocessor that holds few blocks, as in small batches."""
    latent = work.value_dim > 256  # many heads share one key: their products take longer than their reads
    threads = config["warps"] * target.warp_size
    wide = _wide(work, target) and config["rows"] >= 64
    operands = 0 if wide else config["rows"] * work.key_dim / 2 / threads  # queries stay in registers
    registers = 60 + operands + config["rows"] * (work.value_dim + config["tile"]) / threads
    blocks = min(_blocks(work, target, config, registers), 1 if latent else 2)
    if blocks == 0 or (target.backend == "cuda" and registers > 200):
        return float("inf")
    tile_bytes = config["tile"] * work.read * work.cached
    roof = target.roofline(share=0.25).among(target.multiprocessors)
    products = roof.arithmetic_seconds(2 * config["rows"] * config["tile"] * (work.key_dim + work.value_dim))
    seconds = max(
        roof.memory_seconds(tile_bytes),
        (_tile_seconds(config, work.block_size) + latent * products) / blocks,
        _LATENCY / ((config["stages"] - 1) * blocks),
    )
    parts = -(-work.group // config["heads"])
    seconds *= _spilled(work, target, config)
    return seconds * parts / config["tile"] * (1 + config["tile"] / 2048)  # shorter tiles balance the load better


def _split_cost(
    work: Workload, tiling: AttentionTiling, sequences: int, span: int, target: Target, splits: int, decode: bool
) -> float:
    """Seconds of a step, summed over contexts of several lengths; one sequence is assumed to be four times as long."""
    heads = work.kv_heads * -(-work.group // tiling.heads)
    tile_bytes = tiling.tile * work.read * work.cached
    roof = target.roofline()
    step = _tile_seconds(tiling, work.block_size)
    total = 0.0
    for context in (512, 2048, 8192):
        tiles = -(-min(context, span) // tiling.tile)
        share = -(-tiles // splits)
        programs = sequences * heads * -(-tiles // share)
        resident = min(4, -(-programs // target.multiprocessors))
        waves = max(1.0, programs / (target.multiprocessors * resident))
        longest = -(-min(4 * context, span) // (tiling.tile * splits))
        busy = waves * share * max(step, roof.among(target.multiprocessors).memory_seconds(resident * tile_bytes))
        total += max(busy, longest * step) + _BLOCK * (sequences * heads * splits - programs)
        if splits > 1:
            states = sequences * work.kv_heads * work.group * -(-tiles // share)
            at_once = max(2048 * tiling.warps // (power_of_two(tiling.heads) * work.value_dim), 1)
            merging = _LATENCY * (1 + -(-tiles // share) / at_once)  # to find the last program, and to read all results
            total += (merging if decode else _LAUNCH) + roof.memory_seconds(8 * states * work.value_dim)
    return total
