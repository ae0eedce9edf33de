// x[m, k] -> rows of k_padded 16-bit numbers in stored column order: to[row, p] = x[row, perm[p]], zero beyond k.
// For kernels that copy rows of x in 16-byte pieces: act-order, and an x whose rows do not start on 16 bytes.
#include "mma.cuh"

struct Variant {
  int ordered; // 1: through perm
};

template <Variant V>
__global__ void __launch_bounds__(256) gather(const int* __restrict__ perm, const u16* x, uint4* to, int m,
                                              int k, int k_padded, i64 ldx) {
  let_next_start();
  wait_for_previous(x);
  const int chunk = blockIdx.x * 256 + threadIdx.x;
  if (chunk * 8 >= k_padded) return;
  int from[8];
#pragma unroll
  for (int i = 0; i < 8; i++) from[i] = V.ordered ? perm[chunk * 8 + i] : chunk * 8 + i;
  for (i64 row = blockIdx.y; row < m; row += gridDim.y) {
    u16 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = from[i] < k ? x[row * ldx + from[i]] : u16(0);
    to[row * (k_padded / 8) + chunk] = {v[0] | u32(v[1]) << 16, v[2] | u32(v[3]) << 16, v[4] | u32(v[5]) << 16,
                                        v[6] | u32(v[7]) << 16};
  }
}
