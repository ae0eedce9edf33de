// What sm_75 lacks of the instructions in mma.cuh and imma.cuh, made of those it has: an instruction of sm_80 is done as
// narrower ones on the same registers, a copy that runs by itself as a load and a store. Included by mma.cuh for sm_75.
#pragma once

// Rounded to nearest even; every NaN is the one that the instruction gives.
DEVICE u16 bf16_of(float f) {
  const u32 bits = __float_as_uint(f);
  return f != f ? u16(0x7FFF) : u16((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

// m16n8k16 of 16 bits is two m16n8k8: a0, a1, b0 are the first eight k of rows g, g + 8 and of column g, a2, a3, b1 the
// others, in the lanes and halves where m16n8k8 has them. There is no bf16.
template <Dtype T>
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(T == Dtype::f16);
  mma_k8(d, a[0], a[1], b0);
  mma_k8(d, a[2], a[3], b1);
}

// m16n8k16 of s8 is two m8n8k16, rows g and rows g + 8:
//
//   m8n8k16   a (row g, k 4t to 4t+3), b (k 4t to 4t+3, column g), d0 d1 (row g, columns 2t 2t+1)
//   rows 0-7  a0 b0 -> d0 d1        rows 8-15  a1 b0 -> d2 d3
//
// d += here; m16n8k32 is that of a0, a1, b0 and then of a2, a3, b1.
DEVICE void mma_s8_of_k16(int (&d)[4], const u32* a, u32 b) {
  mma_s8_m8(d[0], d[1], a[0], b);
  mma_s8_m8(d[2], d[3], a[1], b);
}

// mma_tf32, for an a whose numbers are f16: there is no tf32. Columns of b become f16 by a power of two of their own,
// which brings the largest to [2^14, 2^15): what is lost of the others is below 2^-39 of it. Pairs of f16 hold k t and
// t + 4, in A as in B.
DEVICE void mma_tf32_as_f16(float (&d)[4], const float (&a)[4], float b0, float b1) {
  auto pair = [](float low, float high) {
    return from_float<Dtype::f16>(low) | u32(from_float<Dtype::f16>(high)) << 16;
  };
  u32 most = max(__float_as_uint(b0) & 0x7FFFFFFFu, __float_as_uint(b1) & 0x7FFFFFFFu); // sizes as bits are in order
  most = max(most, __shfl_xor_sync(~0u, most, 1));
  most = max(most, __shfl_xor_sync(~0u, most, 2));
  // Of column g; NaNs and infinities stay what they are by any power.
  const int shift = min(14 + 127 - int(most >> 23), 126);
  const float by = __uint_as_float(u32(shift + 127) << 23);
  float sum[4] = {};
  mma_k8(sum, pair(a[0], a[2]), pair(a[1], a[3]), pair(b0 * by, b1 * by));
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int of_column = __shfl_sync(~0u, shift, threadIdx.x % 4 * 8 + 4 * c, 32); // of 2t + c
    const float back = __uint_as_float(u32(127 - of_column) << 23);
    d[c] = fmaf(sum[c], back, d[c]);
    d[2 + c] = fmaf(sum[2 + c], back, d[2 + c]);
  }
}

// There is no cp.async: copies are done when they return, for the thread that makes them. Kernels have a barrier between
// a copy and whoever reads it anyway, and nobody waits.
DEVICE void copy16(u32 to, const void* from, int bytes) {
  u32 v[4] = {};
  load_if<true, 4>(v, from, bytes == 16);
  if (bytes > 0 && bytes < 16) { // the end of a row of 16-bit numbers
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (2 * i < bytes) v[i / 2] |= u32(__ldg(static_cast<const u16*>(from) + i)) << 16 * (i % 2);
  }
  store_shared16(to, v);
}
DEVICE void copy16_or_zero(u32 to, const void* from, bool wanted) { copy16(to, from, wanted ? 16 : 0); }
DEVICE void copy16_or_zero_if(u32 to, const void* from, bool wanted, bool any) {
  if (any) copy16_or_zero(to, from, wanted);
}
DEVICE void copy4(u32 to, const void* from, bool wanted) {
  u32 v = 0;
  load_if<true, 1>(&v, from, wanted);
  store_shared4(to, v);
}
DEVICE void copy_commit() {}
template <int PENDING>
DEVICE void copy_wait() {}
