// x[m, k] -> rows of k_padded 16-bit numbers in stored column order: to[row, p] = x[row, perm[p]], zero beyond k.
// For kernels that copy rows of x in 16-byte pieces: act-order, and an x whose rows do not start on 16 bytes.
#include "mma.cuh"

struct Variant {
  int ordered; // 1: through perm
};

constexpr int ROWS = 8; // rows of a block: each reads its part of perm once

template <Variant V>
__global__ void __launch_bounds__(256) gather(const int* __restrict__ perm, const u16* __restrict__ x, uint4* to, int m,
                                              int k, int k_padded, i64 ldx) {
  const int chunk = blockIdx.x * 256 + threadIdx.x;
  if (chunk * 8 >= k_padded) return;
  int from[8];
#pragma unroll
  for (int i = 0; i < 8; i++) from[i] = V.ordered ? perm[chunk * 8 + i] : chunk * 8 + i;
  for (i64 row = i64(blockIdx.y) * ROWS; row < min(i64(m), i64(blockIdx.y + 1) * ROWS); row++) {
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 a = from[2 * i] < k ? x[row * ldx + from[2 * i]] : 0, b = from[2 * i + 1] < k ? x[row * ldx + from[2 * i + 1]] : 0;
      word[i] = a | b << 16;
    }
    to[row * (k_padded / 8) + chunk] = {word[0], word[1], word[2], word[3]};
  }
}
