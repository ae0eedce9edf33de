// What every kernel does with a finished sum: bias in fp32, one rounding, only real rows and columns.
#pragma once
#include "mma.cuh"

struct Output {
  u16* y;
  i64 ldy;
  int m, n;
  const void* bias; // [n], or null
  Dtype bias_type;

  // The bias of a real column, 0 where there is none.
  DEVICE float bias_at(int column) const {
    if (bias == nullptr || column >= n) return 0;
    if (bias_type == Dtype::f32) return static_cast<const float*>(bias)[column];
    const u16 bits = static_cast<const u16*>(bias)[column];
    return bias_type == Dtype::f16 ? to_float<Dtype::f16>(bits) : to_float<Dtype::bf16>(bits);
  }
  template <Dtype T>
  DEVICE void store(int token, int column, float sum) const {
    if (token < m && column < n) y[token * ldy + column] = from_float<T>(sum + bias_at(column));
  }
  // Eight neighbours of a row; `v` is one 16-byte word of them.
  DEVICE void store8(int token, int column, uint4 v) const {
    if (token >= m) return;
    u16* to = y + token * ldy + column;
    if (column + 8 <= n && reinterpret_cast<u64>(to) % 16 == 0) {
      *reinterpret_cast<uint4*>(to) = v;
    } else {
      const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (column + i < n) to[i] = u16(word[i / 2] >> 16 * (i % 2));
    }
  }
};

// True in every thread of the block that is the last of `count` to get here; what the others wrote is then visible
// to reads past L1 (__ldcg). The counter is left at zero. Everything the block wrote before counts as written.
DEVICE bool last_to_arrive(u32* counter, u32 count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = arrive(counter) == count - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}
