// x[m, k] -> codes of 8 bits, and for each block along k its factor (s8: and its sum). quantize.py defines every bit.
// A thread takes eight k of a row; the lanes of a block, side by side, exchange their maximum and their sum.
#include "eights.cuh"

struct Variant {
  int x;       // Dtype: f16, bf16, f32
  int element; // Element of the codes: s8, e4m3
  int block;   // k that share a factor: 32 or 128
};

template <Variant V>
__global__ void __launch_bounds__(256) quantize(const void* x, uint2* quantized, float* factors, int m, int k,
                                                int k_padded, i64 ldx) {
  constexpr Dtype T = Dtype(V.x);
  constexpr Element E = Element(V.element);
  constexpr int LANES = V.block / 8, ITEM = T == Dtype::f32 ? 4 : 2;
  let_next_start();
  wait_for_previous(x);
  const int chunk = blockIdx.x * 256 + threadIdx.x;
  if (chunk * 8 >= k_padded) return; // whole warps: k_padded is a multiple of 256
  for (i64 row = blockIdx.y; row < m; row += gridDim.y) {
    float v[8];
    load8<T>(static_cast<const u8*>(x) + (row * ldx + chunk * 8) * ITEM, k - chunk * 8, v);
    const Rounded r = rounded<E, LANES>(v);
    quantized[row * (k_padded / 8) + chunk] = {r.codes[0], r.codes[1]};
    if (chunk % LANES == 0) {
      const i64 at = row * (k_padded / V.block) + chunk / LANES;
      if constexpr (E == Element::s8)
        reinterpret_cast<float2*>(factors)[at] = {r.d, r.sum};
      else
        factors[at] = r.d;
    }
  }
}
