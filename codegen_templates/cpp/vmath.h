// Elementary functions on sixteen-lane vectors. exp, tanh, erf and what is built from them are polynomials good to
// about 1-2 units in the last place; the rare ones call libm lane by lane.
#pragma once
#include <math.h>

#include "simd.h"

template <class F> ICC_INLINE VF lanewise(VF x, F f) {
    float t[16];
    vstore(t, x);
    for (int i = 0; i < 16; ++i) t[i] = f(t[i]);
    return vload(t);
}
template <class F> ICC_INLINE VF lanewise(VF x, VF y, F f) {
    float a[16], b[16];
    vstore(a, x), vstore(b, y);
    for (int i = 0; i < 16; ++i) a[i] = f(a[i], b[i]);
    return vload(a);
}
template <class F> ICC_INLINE VI lanewise(VI x, VI y, F f) {
    int32_t a[16], b[16];
    vistore(a, x), vistore(b, y);
    for (int i = 0; i < 16; ++i) a[i] = f(a[i], b[i]);
    return viload(a);
}

// 2^n for integers in [-126, 127].
ICC_INLINE VF pow2i(VI n) { return from_bits(shl<23>(n + vi(127))); }

// exp(x): x = n ln2 + r, |r| <= ln2 / 2, polynomial in r (Cephes expf), scaled in two steps so that results may be
// subnormal or infinite. NaN passes through.
ICC_INLINE VF vexp(VF x) {
    x = min_raw(vf(89.0f), max_raw(vf(-104.0f), x));
    const VF n = vround<_MM_FROUND_TO_NEAREST_INT>(x * vf(1.44269504088896341f));
    VF r = fnma(n, vf(0.693145751953125f), x);
    r = fnma(n, vf(1.42860682030941723212e-6f), r);
    VF p = vf(1.9875691500e-4f);
    p = fma(p, r, vf(1.3981999507e-3f));
    p = fma(p, r, vf(8.3334519073e-3f));
    p = fma(p, r, vf(4.1665795894e-2f));
    p = fma(p, r, vf(1.6666665459e-1f));
    p = fma(p, r, vf(5.0000001201e-1f));
    p = fma(p, r * r, r) + vf(1.0f);
    const VI k = to_int_nearest(n), half = sar<1>(k);
    return p * pow2i(half) * pow2i(k - half);
}

// exp(x) for the weights of a softmax, x <= 0: 2^n * 2^r by a minimax polynomial, 16 instructions where vexp has 23. Its error is
// that of x * log2(e) in float32, at most 6e-8 of exp(0); zero below exp(-87). NaN passes through.
ICC_INLINE VF vexp_weight(VF x) {
    const VF t = max_raw(vf(-87.0f), x) * vf(1.44269504088896341f);
    const VF n = vround<_MM_FROUND_TO_NEAREST_INT>(t), r = t - n;
    VF p = vf(1.53458124e-4f);
    p = fma(p, r, vf(1.33999309e-3f));
    p = fma(p, r, vf(9.61848907e-3f));
    p = fma(p, r, vf(5.55032864e-2f));
    p = fma(p, r, vf(2.40226462e-1f));
    p = fma(p, r, vf(6.93147182e-1f));
    p = fma(p, r, vf(1.0f));
    return select(lt(x, vf(-87.0f)), vf(0.0f), p * pow2i(to_int_nearest(n)));
}

// tanh(x) (Cephes tanhf): an odd polynomial near zero, 1 - 2 / (exp(2|x|) + 1) elsewhere.
ICC_INLINE VF vtanh(VF x) {
    const VF a = vabs(x), z = x * x;
    VF p = vf(-5.70498872745e-3f);
    p = fma(p, z, vf(2.06390887954e-2f));
    p = fma(p, z, vf(-5.37397155531e-2f));
    p = fma(p, z, vf(1.33314422036e-1f));
    p = fma(p, z, vf(-3.33332819422e-1f));
    const VF small = fma(p * z, x, x);
    const VF large = copysign(vf(1.0f) - vf(2.0f) / (vexp(a + a) + vf(1.0f)), x);
    return select(lt(a, vf(0.625f)), small, select(ne(x, x), x, large));
}

// erf(x): odd polynomial below 0.9277, 1 - exp(polynomial) above; both minimax fits below one unit in the last place.
ICC_INLINE VF verf(VF x) {
    const VF t = vabs(x), s = x * x;
    VF r = fma(vf(-1.72853470e-5f), t, vf(3.83197126e-4f));
    const VF u = fma(vf(-3.88396438e-3f), t, vf(2.42546219e-2f));
    r = fma(r, s, u);
    r = fma(r, t, vf(-1.06777877e-1f));
    r = fma(r, t, vf(-6.34846687e-1f));
    r = fma(r, t, vf(-1.28717512e-1f));
    r = fma(r, t, vneg(t));
    const VF tail = copysign(select(gt(t, vf(4.0f)), vf(1.0f), vf(1.0f) - vexp(r)), x);
    VF c = vf(-5.96761703e-4f);
    c = fma(c, s, vf(4.99119423e-3f));
    c = fma(c, s, vf(-2.67681349e-2f));
    c = fma(c, s, vf(1.12819925e-1f));
    c = fma(c, s, vf(-3.76125336e-1f));
    c = fma(c, s, vf(1.28379166e-1f));
    const VF core = fma(c, x, x);
    return select(ne(x, x), x, select(gt(t, vf(0.927734375f)), tail, core));
}

ICC_INLINE VF vsigmoid(VF x) { return vf(1.0f) / (vf(1.0f) + vexp(vneg(x))); }
ICC_INLINE VF vsilu(VF x) { return x / (vf(1.0f) + vexp(vneg(x))); }
// x * Phi(x) (GELU), by erfc(t) = exp(a polynomial of t), fitted for t up to 6: Phi is half of it below zero, and one less that
// above, so that nothing cancels. Within 2e-8 of the value at most, but for the rounding of what is multiplied.
ICC_INLINE VF vgelu_erf(VF x) {
    const VF t = vabs(x) * vf(0.70710678118654752f);
    VF p = vf(-1.012501912e-06f);
    p = fma(p, t, vf(1.927725134e-05f));
    p = fma(p, t, vf(-1.575740316e-04f));
    p = fma(p, t, vf(7.151683676e-04f));
    p = fma(p, t, vf(-1.760663581e-03f));
    p = fma(p, t, vf(2.177692659e-04f));
    p = fma(p, t, vf(1.913667656e-02f));
    p = fma(p, t, vf(-1.027769148e-01f));
    p = fma(p, t, vf(-6.366190314e-01f));
    p = fma(p, t, vf(-1.128379226e+00f));
    const VF half = vf(0.5f) * vexp_weight(p * t);
    return x * select(lt(x, vf(0.0f)), half, vf(1.0f) - half);
}
ICC_INLINE VF vgelu_tanh(VF x) {
    const VF inner = vf(0.79788456080286535588f) * fma(vf(0.044715f) * x * x, x, x);
    return vf(0.5f) * x * (vf(1.0f) + vtanh(inner));
}
ICC_INLINE VF vsoftplus(VF x) {  // linear above 20, as torch
    const VF soft = lanewise(vexp(min_raw(vf(20.0f), x)), [](float v) { return log1pf(v); });
    return select(gt(x, vf(20.0f)), x, soft);
}
ICC_INLINE VF vsign(VF x) {
    return select(gt(x, vf(0.0f)), vf(1.0f), select(lt(x, vf(0.0f)), vf(-1.0f), select(ne(x, x), x, vf(0.0f))));
}
ICC_INLINE VF vlog(VF x) { return lanewise(x, [](float v) { return logf(v); }); }
ICC_INLINE VF vlog1p(VF x) { return lanewise(x, [](float v) { return log1pf(v); }); }
ICC_INLINE VF vexpm1(VF x) { return lanewise(x, [](float v) { return expm1f(v); }); }
ICC_INLINE VF vsin(VF x) { return lanewise(x, [](float v) { return sinf(v); }); }
ICC_INLINE VF vcos(VF x) { return lanewise(x, [](float v) { return cosf(v); }); }
ICC_INLINE VF vtan(VF x) { return lanewise(x, [](float v) { return tanf(v); }); }
ICC_INLINE VF vpow(VF x, VF y) { return lanewise(x, y, [](float a, float b) { return powf(a, b); }); }
ICC_INLINE VF vfloordiv(VF x, VF y) {
    return lanewise(x, y, [](float a, float b) {
        if (b == 0.0f) return a / b;
        const float m = fmodf(a, b);
        const float q = (a - m) / b;
        return floorf(m != 0.0f && (m < 0.0f) != (b < 0.0f) ? q - 1.0f + 0.5f : q + 0.5f);
    });
}
ICC_INLINE VF vremainder(VF x, VF y) {
    return lanewise(x, y, [](float a, float b) {
        const float m = fmodf(a, b);
        return m != 0.0f && (m < 0.0f) != (b < 0.0f) ? m + b : m;
    });
}
// Integer division and remainder toward minus infinity; zero divisors give zero, INT_MIN / -1 wraps.
ICC_INLINE int32_t floor_div(int32_t a, int32_t b) {
    if (b == 0) return 0;
    const int64_t q = (int64_t)a / b;
    return (int32_t)((int64_t)a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q);
}
ICC_INLINE VI vfloordiv(VI x, VI y) {
    return lanewise(x, y, [](int32_t a, int32_t b) { return floor_div(a, b); });
}
ICC_INLINE VI vremainder(VI x, VI y) {
    return lanewise(x, y, [](int32_t a, int32_t b) { return (int32_t)((int64_t)a - (int64_t)floor_div(a, b) * b); });
}
ICC_INLINE VI vabs(VI x) { return vmax(x, vi(0) - x); }
ICC_INLINE VI vsign(VI x) { return select(gt(x, vi(0)), vi(1), select(lt(x, vi(0)), vi(-1), vi(0))); }
