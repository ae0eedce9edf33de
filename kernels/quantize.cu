// x[m, k] -> codes of 8 bits, and for each block along k its factor (s8: and its sum). quantize.py defines every bit.
// A thread takes eight k of a row; the lanes of a block, side by side, exchange their maximum and their sum.
#include "eights.cuh"

struct Variant {
  int x;       // Dtype: f16, bf16, f32
  int element; // Element of the codes: s8, e4m3
  int block;   // k that share a factor: 32 or 128
};

constexpr float LARGEST(Element e) { return e == Element::s8 ? 127.0f : 448.0f; }

// The code of v, at most a rounding error beyond the largest number of E.
template <Element E>
DEVICE u8 code(float v) {
  const float size = fminf(fabsf(v), LARGEST(E));
  const u32 sign = __float_as_uint(v) >> 31;
  if constexpr (E == Element::s8) {
    const int q = int(roundf(size)); // half away from zero
    return u8(sign ? -q : q);
  } else {
    // Normal numbers: the upper bits of the float, ties to even; below 2^-6 steps of 2^-9, and eight of them are 2^-6.
    const u32 bits = __float_as_uint(size), rounded = bits + 0x7FFFFu + (bits >> 20 & 1);
    const u32 magnitude = size < 0.015625f ? u32(rintf(size * 512.0f)) : (rounded >> 20) - (120u << 3);
    return u8(sign << 7 | magnitude);
  }
}

template <Variant V>
__global__ void __launch_bounds__(256) quantize(const void* __restrict__ x, uint2* quantized, float* factors, int m, int k,
                                                int k_padded, i64 ldx) {
  constexpr Dtype T = Dtype(V.x);
  constexpr Element E = Element(V.element);
  constexpr int LANES = V.block / 8, ITEM = T == Dtype::f32 ? 4 : 2;
  let_next_start();
  const int chunk = blockIdx.x * 256 + threadIdx.x;
  if (chunk * 8 >= k_padded) return; // whole warps: k_padded is a multiple of 256
  for (i64 row = blockIdx.y; row < m; row += gridDim.y) {
    float v[8];
    load8<T>(static_cast<const u8*>(x) + (row * ldx + chunk * 8) * ITEM, k - chunk * 8, v);
    u32 most = 0; // sizes as bits: in order, and a NaN is the largest
    float sum = v[0];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      most = max(most, __float_as_uint(v[i]) & 0x7FFFFFFFu);
      if (i) sum += v[i];
    }
#pragma unroll
    for (int lane = 1; lane < LANES; lane *= 2) {
      most = max(most, __shfl_xor_sync(~0u, most, lane));
      sum += __shfl_xor_sync(~0u, sum, lane);
    }
    const bool finite = most < INFINITE;
    const float d = finite ? __fdiv_rn(__uint_as_float(most), LARGEST(E)) : __uint_as_float(NOT_A_NUMBER);
    u32 codes[2] = {};
    if (d > 0) {
#pragma unroll
      for (int i = 0; i < 8; i++) codes[i / 4] |= u32(code<E>(__fdiv_rn(v[i], d))) << 8 * (i % 4);
    }
    quantized[row * (k_padded / 8) + chunk] = {codes[0], codes[1]};
    if (chunk % LANES == 0) {
      const i64 at = row * (k_padded / V.block) + chunk / LANES;
      if constexpr (E == Element::s8)
        reinterpret_cast<float2*>(factors)[at] = {d, finite ? sum : d};
      else
        factors[at] = d;
    }
  }
}
