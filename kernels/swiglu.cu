// y[m, n] = silu(gate) * up, all of one type; float32 inside, rounded once. Rows of gate and up lie side by side.
#include "output.cuh"
#include "silu.cuh"

struct Variant {
  int y; // Dtype: f16, bf16, f32
};

constexpr int THREADS = 256;

template <Variant V>
__global__ void __launch_bounds__(THREADS) swiglu(const void* gate, const void* up, u16* y, int m, int n, i64 ldy) {
  constexpr Dtype T = Dtype(V.y);
  let_next_start();
  wait_for_previous(gate);
  wait_for_previous(up);
  const int column = blockIdx.x * THREADS + threadIdx.x;
  if (column >= n) return;
  const Output out{y, ldy, m, n, nullptr, T};
  for (i64 row = blockIdx.y; row < m; row += gridDim.y)
    out.put<T>(row, column, __fmul_rn(silu(load<T>(gate, row * n + column)), load<T>(up, row * n + column)));
}
