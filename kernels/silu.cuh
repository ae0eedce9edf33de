// silu(v) = v / (1 + exp(-v)) in float32 operations that are each rounded to nearest even and never fused, so that
// kernels/swiglu.py computes the same bits.
#pragma once
#include "mma.cuh"

// exp(v) for v <= 0: 2^n exp(r), n = round(v / ln 2), exp(r) by its series up to r^7. 0 from -104 on; a NaN stays one.
DEVICE float exp_of_negative(float v) {
  if (!(v > -104.0f)) return v != v ? v : 0.0f;
  const float n = rintf(__fmul_rn(v, 1.44269504f));
  // ln 2 in two parts: n times the first is exact.
  const float r = __fsub_rn(__fsub_rn(v, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
  constexpr float series[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  float e = series[0];
#pragma unroll
  for (int i = 1; i < 8; i++) e = __fadd_rn(__fmul_rn(e, r), series[i]);
  // 2^n in two steps: it may be subnormal, its roots are not.
  const int whole = int(n), half = whole / 2;
  const float first = __uint_as_float(u32(half + 127) << 23), second = __uint_as_float(u32(whole - half + 127) << 23);
  return __fmul_rn(__fmul_rn(e, first), second);
}

// Split by sign, so that exp never overflows.
DEVICE float silu(float v) {
  if (v >= 0) return __fdiv_rn(v, __fadd_rn(1.0f, exp_of_negative(-v)));
  const float e = exp_of_negative(v);
  return __fdiv_rn(__fmul_rn(v, e), __fadd_rn(1.0f, e));
}
