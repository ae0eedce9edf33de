// x[m, k] -> rows of k_padded 16-bit numbers in stored column order: to[row, p] = x[row, perm[p]], zero beyond k.
// For kernels that copy rows of x in 16-byte pieces: act-order, an x whose rows do not start on 16 bytes, and strips.
#include "mma.cuh"

struct Variant {
  int order; // 0: as it lies; 1: through perm; 2: within each 16 as strips hold k
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
  for (int i = 0; i < 8; i++) {
    const int p = chunk * 8 + i;
    from[i] = V.order == 1 ? perm[p] : V.order == 0 ? p : p / 16 * 16 + p % 8 / 2 * 4 + p % 16 / 8 * 2 + p % 2;
  }
  for (i64 row = blockIdx.y; row < m; row += gridDim.y) {
    u16 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = from[i] < k ? x[row * ldx + from[i]] : u16(0);
    to[row * (k_padded / 8) + chunk] = {v[0] | u32(v[1]) << 16, v[2] | u32(v[3]) << 16, v[4] | u32(v[5]) << 16,
                                        v[6] | u32(v[7]) << 16};
  }
}
