// The largest logit of each row without reading all of a head's 8-bit weight.
//
// The high nibbles of the codes, with the mean of the low ones, give every logit but for two errors. The low nibbles lean
// to the row that they are part of: that share of the logit is missing, at most what the header of the tile says. Else they
// are residues of rounding that have nothing to do with the activations, so that the error has the deviation
// sqrt(sum over k of (x * scale * RESIDUE)^2). A logit that ends SCREEN_MARGIN deviations below the largest cannot be
// it, and the tiles of all others, usually a few in a hundred, are computed in full, and some more as a sample. What they
// were off by is checked: if one of them is off by more than SCREEN_TRUST deviations, the codes are no such residues, and
// all is computed in full. A logit would have to be ten deviations off where none of the sample is six: for a normal
// error a chance of 1e-23 per logit.
// What is computed in full has the bits that gemm_quant gives. The idea is that of a bound on inner products by which
// candidates are skipped, as in maximum inner product search; the bound here is one of probability.
#pragma once
#include <math.h>

#include "gemm.h"

constexpr float RESIDUE = 4.61f;        // deviation of a uniform nibble: sqrt((16 * 16 - 1) / 12)
constexpr float SCREEN_MARGIN = 10.0f;  // deviations
constexpr float SCREEN_TRUST = 6.0f;
constexpr int64_t SCREEN_SAMPLE = 128;  // one tile in so many is computed in full in any case
constexpr int SCREEN_REST = 8;          // steps without screening after one in which it did not pay

// Counts a rest down; whether it is over.
ICC_INLINE bool screen_pays(int32_t& rest) { return rest == 0 || rest-- == 0; }

ICC_INLINE float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

// The largest of the first `width` floats; a NaN may be overlooked.
ICC_INLINE float largest(const float* y, int width) {
    if (width == 16) return hmax(vload(y));
    float top = y[0];
    for (int i = 1; i < width; ++i) top = y[i] > top ? y[i] : top;
    return top;
}

// norms[r][g] = |x| of row r in group g, times SCREEN_MARGIN deviations of one code.
ICC_INLINE void row_norms(const QuantRows& x, int m, float* norms) {
    const int groups = x.groups();
    for (int64_t i = 0; i < (int64_t)m * groups; ++i) {
        VF sum = vf(0.0f);
        for (int j = 0; j < x.group; j += 16) {
            const VF q = load_i8(x.q + i * x.group + j);
            sum = fma(q, q, sum);
        }
        norms[i] = root(hsum(sum)) * x.scales[i] * (SCREEN_MARGIN * RESIDUE);
    }
}

// How far a row's logits in a tile may be off, of which the largest is `top`.
ICC_INLINE float screen_margin(const char* tile, const float* norms, int groups, int64_t group_bytes, float top) {
    float sum = 0.0f, lean;
    memcpy(&lean, tile + 56, 4);
    for (int g = 0; g < groups; ++g) {
        float scale;
        memcpy(&scale, tile + g * group_bytes + 52, 4);
        sum += scale * norms[g] * (scale * norms[g]);
    }
    return lean < 0.5f ? root(sum) + fabsf(top) * lean / (1.0f - lean) : INFINITY;
}

// One thread's part of a screened product of m <= SCREENED_ROWS rows. In y: the logits of all tiles that can hold the
// largest, and minus infinity. False where that did not pay or cannot be trusted; y is not to be used then.
template <int ROUGH, int FULL>
ICC_INLINE bool gemm_screened(const QuantMicro (&rough)[ROUGH], const QuantMicro (&full)[FULL], const QuantTiles& w,
                              const QuantRows& x, int64_t n, Range tiles, int m, const Sink& sink, char* scratch) {
    if (tiles.begin == tiles.end || m == 0) return true;
    const int chosen = pick(rough, m), groups = x.groups();  // both lists begin alike
    const int64_t group_bytes = w.bytes / groups;
    const auto line = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    float* norms = (float*)(scratch + line(rough[chosen].panel_bytes(x.k) + rough[chosen].mr * 8 * groups));
    float* margins = (float*)((char*)norms + line(4 * (int64_t)m * groups));  // [tiles][m]
    const auto same = [](int i) { return (int64_t)i; };
    const auto width = [&](int64_t tile) { return (int)(n - tile * 16 < 16 ? n - tile * 16 : 16); };
    const auto logits = [&](int64_t tile, int r) { return sink.y + r * sink.y_stride + tile * 16; };
    const auto margin = [&](int64_t tile, int r) -> float& { return margins[(tile - tiles.begin) * m + r]; };
    alignas(64) float out[MAX_BLOCK];
    pack_quant(x, 0, m, rough[chosen], scratch, same);
    row_norms(x, m, norms);

    int64_t leader[SCREENED_ROWS];  // the tile with the largest rough logit of each row
    float floor[SCREENED_ROWS];     // and later its largest true one
    for (int r = 0; r < m; ++r) leader[r] = tiles.begin, floor[r] = -INFINITY;
    for_tile_groups(tiles, [&](const int64_t* group, int size) {
        for (int first = 0; first < size;) {
            const int64_t* at = group + first;
            const int live = run_tiles(rough[chosen], w, at, size - first, scratch, x, out);
            store_block(sink, out, m, rough[chosen].nt, 0, at, live, n, same);
            for (int t = 0; t < live; ++t)
                for (int r = 0; r < m; ++r) {
                    const float top = largest(logits(at[t], r), width(at[t]));
                    margin(at[t], r) = screen_margin(w.data + at[t] * w.bytes, norms + r * groups, groups, group_bytes, top);
                    if (top > floor[r]) floor[r] = top, leader[r] = at[t];
                }
            first += live;
        }
    });

    bool trusted = true;
    const auto refine = [&](const int64_t* at, int size) {
        for (int first = 0; first < size;) {
            const int live = run_tiles(full[chosen], w, at + first, size - first, scratch, x, out);
            for (int t = 0; t < live; ++t)
                for (int r = 0; r < m; ++r) {
                    const int64_t tile = at[first + t];
                    VF exact = vload(out + (r * full[chosen].nt + t) * 16);
                    const VF guess = vload_n(logits(tile, r), width(tile));
                    if (sink.bias) exact = exact + vload_n(sink.bias + tile * 16, width(tile));
                    alignas(64) float off[16];
                    vstore(off, vabs(exact - guess));
                    trusted = trusted && largest(off, width(tile)) <= margin(tile, r) * (SCREEN_TRUST / SCREEN_MARGIN);
                    vstore_n(logits(tile, r), exact, width(tile));
                }
            first += live;
        }
    };
    for (int r = 0; r < m; ++r) {
        refine(&leader[r], 1);
        floor[r] = largest(logits(leader[r], r), width(leader[r]));
    }
    const auto can_win = [&](int64_t tile) {
        bool can = tile % SCREEN_SAMPLE == 0;
        for (int r = 0; r < m; ++r)  // negated, so that NaN can
            can |= !(largest(logits(tile, r), width(tile)) + margin(tile, r) < floor[r]);
        return can;
    };
    int64_t candidates = 0;
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) candidates += can_win(tile);
    if (candidates * 3 > tiles.end - tiles.begin) return false;
    int64_t some[TILE_GROUP];
    int count = 0;
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
        if (can_win(tile)) {
            some[count++] = tile;
        } else {
            for (int r = 0; r < m; ++r) vstore_n(logits(tile, r), vf(-INFINITY), width(tile));
        }
        if (count == TILE_GROUP || (count && tile + 1 == tiles.end)) refine(some, count), count = 0;
    }
    return trusted;
}
