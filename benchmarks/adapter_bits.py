"""What adapter pools in int8 would save per step: products with A and B, another adapter per sequence, bf16 and int8.

    python benchmarks/adapter_bits.py --batch 16 --rank 16

Runs the loops of icc's CPU adapter kernels in one thread, over pools of the 1B shape that exceed every cache: tiles of
16 columns, whose values are widened to float32 and multiplied by a value of the row. int8 has a scale per row of A
and of B. Prints CPU time (median, least and largest of interleaved rounds), then the error of B A in int8 against
floats.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
from pathlib import Path

import numpy as np

LAYERS = 16
SITES = [(2048, 2048), (2048, 512), (2048, 512), (2048, 2048), (2048, 8192), (2048, 8192), (8192, 2048)]  # K, N
SOURCE = r"""
#include <cstdint>
#include <cstring>
#include <ctime>
#include <vector>
#include <immintrin.h>
typedef float V __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32), aligned(1)));
typedef int32_t I __attribute__((vector_size(64)));
static inline V wide(const uint16_t* p) { return (V)(__builtin_convertvector(*(const H*)p, U) << 16); }
static inline V wide(const int8_t* p) {
    __m256i halves[2] = {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                         _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
    I whole;
    memcpy(&whole, halves, 64);
    return __builtin_convertvector(whole, V);
}

// y[16 per tile] += x W^T of one matrix in tiles of 16 columns
template <class T> static void product(const T* w, const float* scales, const float* x, float* y, long k, long tiles) {
    for (long t = 0; t < tiles; ++t, w += k * 16) {
        V sum[4] = {};
        for (long i = 0; i < k; i += 4)
            for (int j = 0; j < 4; ++j) sum[j] += wide(w + (i + j) * 16) * x[i + j];
        V total = (sum[0] + sum[1]) + (sum[2] + sum[3]), old, scale;
        if (scales) { memcpy(&scale, scales + t * 16, 64); total *= scale; }
        memcpy(&old, y + t * 16, 64);
        old += total;
        memcpy(y + t * 16, &old, 64);
    }
}

template <class T>
static double step(const std::vector<T>& pools, int layers, int sites, const long* shapes, int batch, int rank,
                   bool scaled) {
    static std::vector<float> x(8192, 0.01f), y(8192), low(256), ones(8192, 1.0f);
    const float* scales = scaled ? ones.data() : nullptr;
    const T* at = pools.data();
    timespec a, b;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    for (int l = 0; l < layers; ++l)
        for (int s = 0; s < sites; ++s) {
            const long k = shapes[2 * s], n = shapes[2 * s + 1];
            for (int i = 0; i < batch; ++i) {
                memset(low.data(), 0, 4 * rank);
                product(at, scales, x.data(), low.data(), k, rank / 16);
                at += k * rank;
                product(at, scales, low.data(), y.data(), rank, n / 16);
                at += n * rank;
            }
        }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    return (b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) * 1e-6;
}

extern "C" void run(int layers, int sites, const long* shapes, int batch, int rank, int rounds, double* bf16,
                    double* int8) {
    long values = 0;
    for (int s = 0; s < sites; ++s) values += (shapes[2 * s] + shapes[2 * s + 1]) * rank;
    values *= (long)layers * batch;
    const std::vector<uint16_t> wide_pools(values, 0x3c00);
    const std::vector<int8_t> narrow_pools(values, 3);
    for (int r = 0; r < rounds; ++r) {
        bf16[r] = step(wide_pools, layers, sites, shapes, batch, rank, false);
        int8[r] = step(narrow_pools, layers, sites, shapes, batch, rank, true);
    }
}
"""


def times(batch: int, rank: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round, by the type of the pools (bf16, int8)."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "pools.cpp", Path(folder) / "pools.so"
        source.write_text(SOURCE)
        subprocess.run(
            ["g++", "-O3", "-march=native", "-shared", "-fPIC", "-Wno-psabi", source, "-o", library], check=True
        )
        found = {kind: (ctypes.c_double * rounds)() for kind in ("bf16", "int8")}
        shapes = (ctypes.c_long * (2 * len(SITES)))(*(size for site in SITES for size in site))
        ctypes.CDLL(str(library)).run(LAYERS, len(SITES), shapes, batch, rank, rounds, *found.values())
    return {kind: list(values) for kind, values in found.items()}


def error(rank: int) -> float:
    """The relative root mean square error of B A if normal A and B are rounded to int8 with a scale per row."""
    random = np.random.default_rng(0)
    a, b = (random.normal(size=shape).astype(np.float32) for shape in ((rank, 2048), (2048, rank)))

    def rounded(values: np.ndarray) -> np.ndarray:
        scale = np.abs(values).max(1, keepdims=True) / 127
        return np.round(values / scale) * scale

    exact = b @ a
    return float(np.linalg.norm(rounded(b) @ rounded(a) - exact) / np.linalg.norm(exact))


def main() -> None:
    """Print a line per kind, and the error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    size = LAYERS * given.batch * given.rank * sum(map(sum, SITES)) / 1e6
    for kind, values in times(given.batch, given.rank, given.rounds).items():
        megabytes = size * (2 if kind == "bf16" else 1)
        print(f"{kind}: {megabytes:.0f} MB, {statistics.median(values):.1f} ms [{min(values):.1f}, {max(values):.1f}]")
    print(f"B A of int8: {100 * error(given.rank):.2f} % from that of floats")


if __name__ == "__main__":
    main()
