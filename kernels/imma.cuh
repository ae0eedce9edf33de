// The instructions of products in 8 bits: the matrix units, with tf32 for what stands beside, and small copies; one
// function each, as in mma.cuh.
#pragma once
#include "mma.cuh"

// Integer sums start at START, so that their bits, up to 2^22 away from it, are a float32: START_AT + sum, exactly.
constexpr int START = 0x4B400000;
constexpr float START_AT = 12582912.0f; // 1.5 * 2^23: a float times it keeps its bits, and one more

// d[16, 8] = START + a[16, 32] b[32, 8] of s8. Lane 4g + t holds a0 (row g, k 4t to 4t+3), a1 (row g+8), a2 (row g,
// k + 16), a3 (g+8, k + 16); b0 (k 4t to 4t+3, column g), b1 (k + 16); d as in mma.
DEVICE void mma_s8(int (&d)[4], const u32* a, u32 b0, u32 b1) {
#if __CUDA_ARCH__ < 800
  d[0] = d[1] = d[2] = d[3] = START;
  mma_s8_of_k16(d, a, b0);
  mma_s8_of_k16(d, a + 2, b1);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(START));
#endif
}
// Half of it: a0, a1 and b0, 16 k.
DEVICE void mma_s8(int (&d)[4], const u32* a, u32 b0) {
#if __CUDA_ARCH__ < 800
  d[0] = d[1] = d[2] = d[3] = START;
  mma_s8_of_k16(d, a, b0);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0), "r"(START));
#endif
}

// d[16, 8] += a[16, 32] b[32, 8] of e4m3, lanes as in mma_s8; sm_89 and newer.
DEVICE void mma_e4m3(float (&d)[4], const u32* a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16, 8] += a[16, 8] b[8, 8] of float32, of which the upper 19 bits count. Lane 4g + t holds a0 (row g, k t), a1 (row
// g+8), a2 (row g, k t+4), a3 (g+8, t+4); b0 (k t, column g), b1 (k t+4).
DEVICE void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
#if __CUDA_ARCH__ < 800
  mma_tf32_as_f16(d, a, b0, b1);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
#endif
}

// Byte i of the result is byte (select >> 4i) & 7 of b:a; `select` from a register.
DEVICE u32 prmt(u32 a, u32 b, u32 select) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(select));
  return d;
}

#if __CUDA_ARCH__ >= 800
// Four bytes to shared memory, or zeros.
DEVICE void copy4(u32 to, const void* from, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(wanted ? 4 : 0) : "memory");
}
#endif
