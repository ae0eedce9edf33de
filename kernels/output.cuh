// What every kernel does with a finished sum: bias and residual in fp32, rounded once or after each step, and stored for
// real rows and columns only. kernels/epilogue.py computes the same bits: a sum's last factor is rounded before bias is
// added, so the compiler may not make one fma of the two.
#pragma once
#include "mma.cuh"

// v as a number of type T.
template <Dtype T>
DEVICE float nearest(float v) {
  if constexpr (T == Dtype::f32)
    return v;
  else
    return to_float<T>(from_float<T>(v));
}

// Number i of an array of type T.
template <Dtype T>
DEVICE float load(const void* from, i64 i) {
  if constexpr (T == Dtype::f32)
    return static_cast<const float*>(from)[i];
  else
    return to_float<T>(static_cast<const u16*>(from)[i]);
}

// y, bias and residual of a product; T below is y's type.
struct Output {
  u16* y;
  i64 ldy;
  int m, n;
  const void* bias; // [n], or null
  Dtype bias_type;
  const void* residual = nullptr; // [m, n] of y's type, or null
  i64 ld_residual = 0;
  int each = 0; // 1: the sum is rounded, and again after bias and after residual

  // The bias of a real column, 0 where there is none.
  DEVICE float bias_at(int column) const {
    if (bias == nullptr || column >= n) return 0;
    if (bias_type == Dtype::f32) return load<Dtype::f32>(bias, column);
    return bias_type == Dtype::f16 ? load<Dtype::f16>(bias, column) : load<Dtype::bf16>(bias, column);
  }
  // A sum and its bias -> what is left to round; `plus` is the bias.
  template <Dtype T>
  DEVICE float ended(float sum, float plus, int token, int column) const {
    if (each) sum = nearest<T>(sum);
    sum = __fadd_rn(sum, plus);
    if (residual == nullptr || token >= m || column >= n) return sum;
    if (each) sum = nearest<T>(sum);
    return __fadd_rn(sum, load<T>(residual, token * ld_residual + column));
  }
  // Two neighbouring tokens of a column as a pair.
  template <Dtype T>
  DEVICE u32 ended2(float low, float high, float plus, int token, int column) const {
    if (residual == nullptr && !each) return pack<T>(__fadd_rn(low, plus), __fadd_rn(high, plus));
    return pack<T>(ended<T>(low, plus, token, column), ended<T>(high, plus, token + 1, column));
  }
  template <Dtype T>
  DEVICE void store(int token, int column, float sum) const {
    put<T>(token, column, ended<T>(sum, bias_at(column), token, column));
  }
  template <Dtype T>
  DEVICE void put(int token, int column, float v) const {
    if (token >= m || column >= n) return;
    if constexpr (T == Dtype::f32)
      reinterpret_cast<float*>(y)[token * ldy + column] = v;
    else
      y[token * ldy + column] = from_float<T>(v);
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
