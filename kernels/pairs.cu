// x[m, k] float32 -> rows 2i and 2i + 1 of k_padded f16, in stored column order, whose sum times factors[i], a power of
// two, is row i but for the last bits: 22 of each number are kept, or those above 2^-39 of the row's largest.
//
//   x = factor * (high + low)    high = f16(x / factor), low = f16(x / factor - high), largest |high| in [2^14, 2^15]
//
// One block for each row. A NaN or an infinity makes its row NaN.
#include "eights.cuh"

struct Variant {
  int ordered; // 1: through perm
};

constexpr int THREADS = 512;

template <Variant V>
__global__ void __launch_bounds__(THREADS) pairs(const int* __restrict__ perm, const float* x, u16* to, float* factors,
                                                 int m, int k, int k_padded, i64 ldx) {
  __shared__ u32 largest[THREADS / 32];
  let_next_start();
  wait_for_previous(x);
  for (i64 row = blockIdx.x; row < m; row += gridDim.x) {
    const float* from = x + row * ldx;
    u32 most = 0; // sizes as bits are in order, and a NaN is the largest
    for (int p = threadIdx.x; p < k; p += THREADS) most = max(most, __float_as_uint(from[p]) & 0x7FFFFFFFu);
    most = most_of_block(most, largest);
    // 2^shift brings the largest number to 2^14 or more; beyond 2^127 it is no float. Rows of zeros and NaNs stay.
    const int exponent = int(most >> 23) - 127;
    const int shift = most == 0 || exponent == 128 ? 0 : min(14 - exponent, 127);
    const float by = __uint_as_float(u32(shift + 127) << 23);
    if (threadIdx.x == 0) factors[row] = shift == 127 ? __uint_as_float(0x00400000u) : __uint_as_float(u32(127 - shift) << 23);
    u16 *high = to + 2 * row * k_padded, *low = high + k_padded;
    for (int p = threadIdx.x; p < k_padded; p += THREADS) {
      const int at = V.ordered ? perm[p] : p;
      const float v = at < k ? from[at] * by : 0.0f;
      high[p] = from_float<Dtype::f16>(v);
      low[p] = from_float<Dtype::f16>(v - to_float<Dtype::f16>(high[p]));
    }
  }
}
