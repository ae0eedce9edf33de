// Stands in for kernels/imma.cuh, as mma.cuh here does for its own.
#pragma once
#include "mma.cuh"

constexpr int START = 0x4B400000;
constexpr float START_AT = 12582912.0f;

inline int s8(u32 word, int i) { return static_cast<signed char>(word >> 8 * i); }
inline float e4m3(u32 word, int i) {
  const u32 code = word >> 8 * i & 0xFF, exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent ? std::ldexp(8.0f + mantissa, int(exponent) - 10) : std::ldexp(float(mantissa), -9);
  return code & 0x80 ? -size : size;
}

// Sums over k of a, b: word (k / 16) of lane 4 (row % 8) + k % 16 / 4 for row < 8, another register from there on.
template <class Sum, class Value>
void mma_bytes(Sum (&d)[4], const u32* a, const u32* b, int depth, Value value) {
  Warp& w = warp_here();
  const int lane = threadIdx.x % 32;
  std::copy(a, a + depth / 8, w.a[lane]);
  std::copy(b, b + depth / 16, w.b[lane]);
  warp_wait();
  for (int c = 0; c < 4; c++) {
    const int row = lane / 4, half = c / 2, column = lane % 4 * 2 + c % 2;
    double sum = d[c];
    for (int k = 0; k < depth; k++)
      sum += double(value(w.a[4 * row + k % 16 / 4][half + k / 16 * 2], k % 4)) *
             value(w.b[4 * column + k % 16 / 4][k / 16], k % 4);
    d[c] = Sum(sum);
  }
  warp_wait();
}
inline void mma_s8(int (&d)[4], const u32* a, u32 b0, u32 b1) {
  d[0] = d[1] = d[2] = d[3] = START;
#if __CUDA_ARCH__ < 800
  mma_s8_of_k16(d, a, b0);
  mma_s8_of_k16(d, a + 2, b1);
#else
  const u32 b[2] = {b0, b1};
  mma_bytes(d, a, b, 32, s8);
#endif
}
inline void mma_s8(int (&d)[4], const u32* a, u32 b0) {
  d[0] = d[1] = d[2] = d[3] = START;
#if __CUDA_ARCH__ < 800
  mma_s8_of_k16(d, a, b0);
#else
  mma_bytes(d, a, &b0, 16, s8);
#endif
}
inline void mma_e4m3(float (&d)[4], const u32* a, u32 b0, u32 b1) {
  const u32 b[2] = {b0, b1};
  mma_bytes(d, a, b, 32, e4m3);
}

inline double tf32(u32 bits) { return __uint_as_float(bits & 0xFFFFE000u); }
inline void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
#if __CUDA_ARCH__ < 800
  mma_tf32_as_f16(d, a, b0, b1);
#else
  Warp& w = warp_here();
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) w.a[lane][i] = __float_as_uint(a[i]);
  w.b[lane][0] = __float_as_uint(b0), w.b[lane][1] = __float_as_uint(b1);
  warp_wait();
  for (int c = 0; c < 4; c++) {
    const int row = lane / 4, half = c / 2, column = lane % 4 * 2 + c % 2;
    double sum = d[c];
    for (int k = 0; k < 8; k++) sum += tf32(w.a[4 * row + k % 4][half + k / 4 * 2]) * tf32(w.b[4 * column + k % 4][k / 4]);
    d[c] = float(sum);
  }
  warp_wait();
#endif
}

inline u32 prmt(u32 a, u32 b, u32 select) {
  u32 d = 0;
  for (int i = 0; i < 4; i++) d |= u32((u64(b) << 32 | a) >> 8 * (select >> 4 * i & 7) & 0xFF) << 8 * i;
  return d;
}

#if __CUDA_ARCH__ >= 800
inline void copy4(u32 to, const void* from, bool wanted) {
  if (wanted) check(from, 4, 4);
  std::memset(shared + to, 0, 4);
  if (wanted) std::memcpy(shared + to, from, 4);
}
#endif
