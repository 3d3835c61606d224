// Read before a source for AVX-VNNI that AVX-512's flags compile: sources tell AVX-512's levels by this macro, which a
// compiler's own headers would define again.
#pragma once
#include <immintrin.h>
#undef __AVX512F__
