// How kernels read rows of x of any type and round them: eight neighbours at a time. quantize.py defines every bit.
#pragma once
#include "mma.cuh"

constexpr u32 NOT_A_NUMBER = 0x7FC00000u, INFINITE = 0x7F800000u;

// Eight neighbours of a row of T, zero from `left` on. Rows may start at any element.
template <Dtype T>
DEVICE void load8(const void* from, int left, float (&v)[8]) {
  constexpr int WORDS = T == Dtype::f32 ? 8 : 4;
  u32 word[WORDS] = {};
  if (left >= 8 && reinterpret_cast<u64>(from) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
      const uint4 four = static_cast<const uint4*>(from)[i];
      word[4 * i] = four.x, word[4 * i + 1] = four.y, word[4 * i + 2] = four.z, word[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (i >= left) continue;
      if constexpr (T == Dtype::f32)
        word[i] = static_cast<const u32*>(from)[i];
      else
        word[i / 2] |= u32(static_cast<const u16*>(from)[i]) << 16 * (i % 2);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if constexpr (T == Dtype::f32)
      v[i] = __uint_as_float(word[i]);
    else
      v[i] = to_float<T>(u16(word[i / 2] >> 16 * (i % 2)));
  }
}

// The largest of what all threads of a block have, in each of them. `largest` has a word for each warp.
template <int WARPS>
DEVICE u32 most_of_block(u32 most, u32 (&largest)[WARPS]) {
#pragma unroll
  for (int lane = 1; lane < 32; lane *= 2) most = max(most, __shfl_xor_sync(~0u, most, lane));
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) most = max(most, largest[w]);
  __syncthreads(); // before the next row's
  return most;
}

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

// A block of 8 x LANES numbers of x: its factor and its sum in each of its lanes, and a lane's own codes.
struct Rounded {
  u32 codes[2];
  float d, sum;
};

// Lanes of a block lie side by side; all of the warp take part.
template <Element E, int LANES>
DEVICE Rounded rounded(const float (&v)[8]) {
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
  Rounded r = {{0, 0}, d, finite ? sum : d};
  if (!(d > 0)) return r;
  bool sure = false;
  if constexpr (E == Element::s8) {
    // v / d by a reciprocal is within 2^-16 of the quotient, which decides unless that is nearly a tie.
    constexpr float SHIFT = 12582912; // 1.5 * 2^23: whole numbers in the last bits, two's complement
    const float by = __frcp_rn(d);
    float off = 0;
    u32 q[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float whole = fmaf(v[i], by, SHIFT);
      off = fmaxf(off, fabsf(fmaf(v[i], by, SHIFT - whole)));
      q[i] = __float_as_uint(whole);
    }
    sure = off < 0.4999f && d > 1e-36f; // its reciprocal is a normal number
#pragma unroll
    for (int i = 0; i < 2; i++)
      r.codes[i] = prmt<0x5410>(prmt<0x0040>(q[4 * i], q[4 * i + 1]), prmt<0x0040>(q[4 * i + 2], q[4 * i + 3]));
  }
  if (!sure) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      r.codes[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) r.codes[i] |= u32(code<E>(__fdiv_rn(v[4 * i + j], d))) << 8 * j;
    }
  }
  return r;
}
