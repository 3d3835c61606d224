// Drives the rendered micro-kernels over a whole product y = x W^T (+ bias).
//
// W lies in tiles of 16 output rows. A thread owns a range of tiles, or of many rows (see part_of). It copies the activation rows of an M-chunk that
// fits its scratch into panels of `mr` interleaved rows (so that a micro-kernel has one activation pointer), then runs
// every tile over every panel. The order of additions over K lives in the micro-kernel alone and is the same for every
// mr, so the bits of a row do not depend on how many rows there are or which panel it falls into.
#pragma once
#include "team.h"

// Where row i of y comes from and goes to. `bias` is per output column, or null.
struct Sink {
    const float* bias;
    float* y;
    int64_t y_stride;
};

// One rendered micro-kernel: mr panel rows x nt tiles -> out[mr][nt][16].
struct DenseMicro {
    int mr, nt;
    void (*run)(const char* const* tiles, const float* panel, int64_t k, float* out);
};
struct QuantMicro {
    int mr, nt;
    void (*run)(const char* const* tiles, const int8_t* panel, const float* scales, const float* sums, int groups,
                int group, float* out);
    bool pairs;  // its panels hold codes of 16 bits, k 0, 2, 1, 3 of each four
    bool eights;  // its panels hold eight k of a row after those of another, and not four
    int zero = -1;  // of all its codes, -1 where they have several: panels then hold where integer sums begin, not sums of x

    int64_t panel_bytes(int64_t k) const { return mr * k * (pairs ? 2 : 1); }

    void store_sum(float* to, float sum) const {
        const int32_t begin = -zero * (int32_t)sum;
        if (zero < 0) *to = sum;
        else memcpy(to, &begin, 4);
    }
};

constexpr int MAX_BLOCK = 16 * 16 * 4;   // floats of the largest out block
constexpr int MAX_PANELS = 64;
constexpr int TILE_GROUP = 4;            // tiles that stay in L2 while the panels of a chunk pass, and streams of weights

constexpr int OWN_ROWS = 64;             // see part_of

struct Panel { int first, rows, micro; char* data; };

// What a thread makes of a product: of many rows its own and all tiles, as the kernels before and after go by rows too and
// cores that pass lines of each other's back and forth wait for them; else its tiles, so that weights are read but once.
struct Part { Range rows, tiles; };
ICC_INLINE Part part_of(const Ctx& c, int64_t rows, int64_t tiles) {
    if (rows >= OWN_ROWS * c.threads) return {share(c, rows), {0, tiles}};
    return {{0, rows}, share(c, tiles)};
}

// The smallest micro-kernel (the list ascends in mr) that holds `rows`, or the largest there is.
template <class Micro, int COUNT> ICC_INLINE int pick(const Micro (&list)[COUNT], int rows) {
    for (int i = 0; i < COUNT; ++i)
        if (list[i].mr >= rows) return i;
    return COUNT - 1;
}

// out[mr][nt][16] -> rows first..first+rows of y, `live` tiles from number tile[0] on. `row` maps a row to its place in y.
template <class RowOf>
ICC_INLINE void store_block(const Sink& sink, const float* out, int rows, int nt, int first, const int64_t* tile, int live,
                            int64_t n, RowOf row) {
    for (int t = 0; t < live; ++t, out += 16) {
        const int64_t col = tile[t] * 16;
        const int width = (int)(n - col < 16 ? n - col : 16);
        const VF bias = sink.bias ? vload_n(sink.bias + col, width) : vf(0.0f);
        for (int r = 0; r < rows; ++r) {
            VF v = vload(out + r * nt * 16);
            if (sink.bias) v = v + bias;
            float* y = sink.y + row(first + r) * sink.y_stride + col;
            if (width == 16) vstore(y, v);
            else vstore_n(y, v, width);
        }
    }
}

// Calls body(tile numbers, how many) for groups of TILE_GROUP tiles. A thread's tiles are cut into that many parts and
// a group takes the next tile of each: so the weights are read as a few long sequential streams, whose prefetches land
// in what is read next.
template <class Body> ICC_INLINE void for_tile_groups(Range tiles, Body body) {
    const int64_t part = (tiles.end - tiles.begin + TILE_GROUP - 1) / TILE_GROUP;
    for (int64_t i = 0; i < part; ++i) {
        int64_t group[TILE_GROUP];
        int count = 0;
        for (int64_t tile = tiles.begin + i; tile < tiles.end; tile += part) group[count++] = tile;
        body(group, count);
    }
}

// Splits rows [0, m) into chunks of panels that fit `budget` bytes, packs each by pack(first, rows, micro, data) and calls
// body(panels, count) per chunk.
template <class Micro, int COUNT, class Pack, class Body>
ICC_INLINE void for_chunks(const Micro (&list)[COUNT], int m, int64_t row_bytes, char* scratch, int64_t budget,
                           Pack pack, Body body) {
    Panel panels[MAX_PANELS];
    for (int done = 0; done < m;) {
        int count = 0;
        int64_t used = 0;
        while (done < m && count < MAX_PANELS) {
            const int micro = pick(list, m - done), mr = list[micro].mr;
            const int64_t need = (mr * row_bytes + 63) / 64 * 64;
            if (count && used + need > budget) break;
            const int rows = m - done < mr ? m - done : mr;
            panels[count] = {done, rows, micro, scratch + used};
            pack(done, rows, list[micro], scratch + used);
            used += need, done += rows, ++count;
        }
        body(panels, count);
    }
}

// x_row(i) -> const float*: K contiguous activations of row i.
template <int COUNT, class XRow, class YRow>
ICC_INLINE void gemm_dense(const DenseMicro (&list)[COUNT], const char* w, int64_t tile_bytes, int64_t k, int64_t n,
                           Range tiles, int m, XRow x_row, YRow y_row, const Sink& sink, char* scratch,
                           int64_t budget) {
    const auto pack = [&](int first, int rows, const DenseMicro& micro, char* data) {
        const int mr = micro.mr;
        float* panel = (float*)data;
        for (int r = 0; r < mr; ++r) {
            const float* x = x_row(first + (r < rows ? r : 0));  // padding rows repeat the first and are dropped
            for (int64_t i = 0; i < k; ++i) panel[i * mr + r] = x[i];
        }
    };
    const auto body = [&](const Panel* panels, int count) {
        for_tile_groups(tiles, [&](const int64_t* group, int size) {
            for (int p = 0; p < count; ++p) {
                const DenseMicro& micro = list[panels[p].micro];
                for (int first = 0; first < size; first += micro.nt) {
                    alignas(64) float out[MAX_BLOCK];
                    const char* at[TILE_GROUP];
                    const int live = size - first < micro.nt ? size - first : micro.nt;
                    for (int t = 0; t < micro.nt; ++t) at[t] = w + group[first + (t < live ? t : 0)] * tile_bytes;
                    micro.run(at, (const float*)panels[p].data, k, out);
                    store_block(sink, out, panels[p].rows, micro.nt, panels[p].first, group + first, live, n, y_row);
                }
            }
        });
    };
    for_chunks(list, m, k * 4, scratch, budget, pack, body);
}

// A quantized weight: `count` tiles of `bytes`; the low nibbles of split codes lie behind them, `low_bytes` per tile.
struct QuantTiles {
    const char *data, *low;
    int64_t bytes, low_bytes, count;

    QuantTiles(const char* data, int64_t bytes, int64_t low_bytes, int64_t n)
        : data(data), low(nullptr), bytes(bytes), low_bytes(low_bytes), count((n + 15) / 16) {
        if (low_bytes) low = data + count * bytes;
    }
};

// Activations as quantize_rows gives them: q i8 [rows, k], scales and sums f32 [rows, k / group].
struct QuantRows {
    const int8_t* q;
    const float *scales, *sums;
    int64_t k;
    int group;

    int groups() const { return (int)(k / group); }
};

#include "panels.h"

// Runs a micro-kernel over at most its nt of the tiles, and says over how many.
ICC_INLINE int run_tiles(const QuantMicro& micro, const QuantTiles& w, const int64_t* tiles, int size, const char* panel,
                         const QuantRows& x, float* out) {
    const float* scales = (const float*)(panel + micro.panel_bytes(x.k));
    const char* at[2 * TILE_GROUP];
    const int live = size < micro.nt ? size : micro.nt;
    for (int t = 0; t < micro.nt; ++t) {
        const int64_t tile = tiles[t < live ? t : 0];
        at[t] = w.data + tile * w.bytes;
        if (w.low) at[micro.nt + t] = w.low + tile * w.low_bytes;
    }
    micro.run(at, (const int8_t*)panel, scales, scales + (int64_t)micro.mr * x.groups(), x.groups(), x.group, out);
    return live;
}

// Rows x_row(i) of x times W give rows y_row(i) of y.
template <int COUNT, class XRow, class YRow>
ICC_INLINE void gemm_quant(const QuantMicro (&list)[COUNT], const QuantTiles& w, const QuantRows& x, int64_t n,
                           Range tiles, int m, XRow x_row, YRow y_row, const Sink& sink, char* scratch,
                           int64_t budget) {
    const auto pack = [&](int first, int rows, const QuantMicro& micro, char* data) {
        pack_quant(x, first, rows, micro, data, x_row);
    };
    const auto body = [&](const Panel* panels, int count) {
        for_tile_groups(tiles, [&](const int64_t* group, int size) {
            for (int p = 0; p < count; ++p) {
                const QuantMicro& micro = list[panels[p].micro];
                for (int first = 0; first < size; first += micro.nt) {
                    alignas(64) float out[MAX_BLOCK];
                    const int live = run_tiles(micro, w, group + first, size - first, panels[p].data, x, out);
                    store_block(sink, out, panels[p].rows, micro.nt, panels[p].first, group + first, live, n, y_row);
                }
            }
        });
    };
    for_chunks(list, m, list[0].panel_bytes(x.k) / list[0].mr + 8 * x.groups(), scratch, budget, pack, body);
}

constexpr int MAX_PAIRS = 2048;  // (token, slot) pairs that are grouped by expert at a time

// Calls body(expert, pairs, count) for each expert with the (token, slot) pair numbers routed to it, in ascending
// order, at most MAX_PAIRS at a time; expert -1 collects the pairs that are not routed.
template <int EXPERTS, class Body> ICC_INLINE void by_expert(const int32_t* index, int64_t pairs, Body body) {
    int32_t order[MAX_PAIRS];
    int32_t start[EXPERTS + 2];
    const auto expert_of = [&](int64_t pair) {
        const int32_t e = index[pair];
        return e >= 0 && e < EXPERTS ? e + 1 : 0;
    };
    for (int64_t base = 0; base < pairs; base += MAX_PAIRS) {
        const int64_t end = base + MAX_PAIRS < pairs ? base + MAX_PAIRS : pairs;
        memset(start, 0, sizeof start);
        for (int64_t i = base; i < end; ++i) ++start[expert_of(i)];
        int32_t sum = 0;
        for (int e = 0; e <= EXPERTS; ++e) {
            const int32_t count = start[e];
            start[e] = sum, sum += count;
        }
        for (int64_t i = base; i < end; ++i) order[start[expert_of(i)]++] = (int32_t)i;
        for (int e = 0; e <= EXPERTS; ++e) {  // start[e] now ends list e
            const int32_t from = e ? start[e - 1] : 0;
            if (start[e] > from) body(e - 1, order + from, start[e] - from);
        }
    }
}

// The same where every token has a row for each expert: no sorting, and the threads share all tiles of all experts.
template <int EXPERTS, class Body> ICC_INLINE void each_expert(const Ctx& c, int64_t tiles, int64_t tokens, Body body) {
    int32_t pairs[MAX_PAIRS];
    const Range all = share(c, tiles * EXPERTS);
    for (int64_t e = all.begin / tiles; e * tiles < all.end; ++e) {
        const int64_t from = all.begin > e * tiles ? all.begin - e * tiles : 0;
        const int64_t to = all.end < (e + 1) * tiles ? all.end - e * tiles : tiles;
        for (int64_t base = 0; base < tokens; base += MAX_PAIRS) {
            const int count = (int)(base + MAX_PAIRS < tokens ? MAX_PAIRS : tokens - base);
            for (int i = 0; i < count; ++i) pairs[i] = (int32_t)((base + i) * EXPERTS + e);
            body((int)e, pairs, count, Range{from, to});
        }
    }
}
