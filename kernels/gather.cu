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
  if constexpr (V.order == 2) {
    // The even ones of 16 k, then the odd ones.
    if (chunk * 16 >= k_padded) return;
    const int rest = k - chunk * 16;
    const bool wide = rest >= 16 && (reinterpret_cast<u64>(x) | u64(ldx) * 2) % 16 == 0;
    for (i64 row = blockIdx.y; row < m; row += gridDim.y) {
      const u16* from = x + row * ldx + chunk * 16;
      u32 v[8];
      if (wide) {
        const uint4 *four = reinterpret_cast<const uint4*>(from), a = four[0], b = four[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
          v[i] = (2 * i < rest ? from[2 * i] : 0u) | (2 * i + 1 < rest ? from[2 * i + 1] : 0u) << 16;
      }
      uint4* pieces = to + row * (k_padded / 8) + 2 * chunk;
      pieces[0] = {prmt<0x5410>(v[0], v[1]), prmt<0x5410>(v[2], v[3]), prmt<0x5410>(v[4], v[5]), prmt<0x5410>(v[6], v[7])};
      pieces[1] = {prmt<0x7632>(v[0], v[1]), prmt<0x7632>(v[2], v[3]), prmt<0x7632>(v[4], v[5]), prmt<0x7632>(v[6], v[7])};
    }
    return;
  }
  if (chunk * 8 >= k_padded) return;
  int from[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int p = chunk * 8 + i;
    from[i] = V.order == 1 ? perm[p] : p;
  }
  for (i64 row = blockIdx.y; row < m; row += gridDim.y) {
    u16 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = from[i] < k ? x[row * ldx + from[i]] : u16(0);
    to[row * (k_padded / 8) + chunk] = {v[0] | u32(v[1]) << 16, v[2] | u32(v[3]) << 16, v[4] | u32(v[5]) << 16,
                                        v[6] | u32(v[7]) << 16};
  }
}
