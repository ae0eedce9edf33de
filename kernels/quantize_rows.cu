// x[m, k] -> whole numbers from -127 to 127 as f16, zeros beyond k, and one factor for each row. quantize.py defines
// every bit. A block takes a row and reads it twice: for its maximum, and to round it.
#include "eights.cuh"

struct Variant {
  int x; // Dtype: f16, bf16, f32
};

constexpr int THREADS = 512;

template <Variant V>
__global__ void __launch_bounds__(THREADS) quantize_rows(const void* x, uint4* quantized, float* factors, int m,
                                                         int k, i64 ldx, i64 ld_quantized) {
  constexpr Dtype T = Dtype(V.x);
  constexpr int ITEM = T == Dtype::f32 ? 4 : 2;
  __shared__ u32 largest[THREADS / 32];
  let_next_start();
  wait_for_previous(x);
  const int chunks = int(ld_quantized / 8);
  for (i64 row = blockIdx.x; row < m; row += gridDim.x) {
    const u8* from = static_cast<const u8*>(x) + row * ldx * ITEM;
    u32 most = 0; // sizes as bits: in order, and a NaN is the largest
    for (int chunk = threadIdx.x; chunk < chunks; chunk += THREADS) {
      float v[8];
      load8<T>(from + i64(chunk) * 8 * ITEM, k - chunk * 8, v);
#pragma unroll
      for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(v[i]) & 0x7FFFFFFFu);
    }
    most = most_of_block(most, largest);
    const float d = most < INFINITE ? __fdiv_rn(__uint_as_float(most), 127.0f) : __uint_as_float(NOT_A_NUMBER);
    if (threadIdx.x == 0) factors[row] = d;
    for (int chunk = threadIdx.x; chunk < chunks; chunk += THREADS) {
      u32 pairs[4] = {};
      if (d > 0) {
        float v[8];
        load8<T>(from + i64(chunk) * 8 * ITEM, k - chunk * 8, v);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float q = __fdiv_rn(v[i], d), size = roundf(fminf(fabsf(q), 127.0f)); // half away from zero
          const u16 code = from_float<Dtype::f16>(size);
          pairs[i / 2] |= u32(q < 0 && size > 0 ? code | 0x8000u : code) << 16 * (i % 2); // no negative zeros
        }
      }
      quantized[row * chunks + chunk] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }
}
