// Rows of a step that ranks divide among themselves, as evenly as can be. Each row keeps its place in memory, so that all are
// there once those of the others were gathered.
#pragma once

// The rows of a rank, of `rows`; all of them where they are fewer than `least`.
ICC_INLINE Range own_rows(const Ranks& r, int rank, int64_t rows, int64_t least) {
    if (rows < least) return {0, rows};
    return {rows * rank / r.count, rows * (rank + 1) / r.count};
}
