// How kernels read rows of x of any type, to round them: eight neighbours at a time, and the largest of a row.
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
