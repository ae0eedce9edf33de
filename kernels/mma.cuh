// Every inline PTX instruction of the mma.sync kernels, one function each; nothing here knows a format or a layout. What
// sm_75 lacks of them is in turing.cuh.
// No CUDA header is needed: 16-bit numbers travel as bits, in u16 or in pairs in u32 (element 0 in the low half).
#pragma once
#include "elements.h"

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__

// ---- bits ----

// LUT: evaluate the wanted expression on a = 0xF0, b = 0xCC, c = 0xAA.
template <int LUT>
DEVICE u32 lop3(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(LUT));
  return d;
}
constexpr int AND_OR = 0xEA, AND_XOR = 0x6A;

// Byte i of the result is byte (SELECT >> 4i) & 7 of b:a.
template <int SELECT>
DEVICE u32 prmt(u32 a, u32 b) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(SELECT));
  return d;
}
// One half of a pair twice, in the form that arithmetic takes as an operand modifier instead of an instruction.
DEVICE u32 twice(u32 pair, int half) {
  u32 both;
  if (half)
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(both) : "r"(pair));
  else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(both) : "r"(pair));
  return both;
}
DEVICE u32 both_low(u32 pair) { return prmt<0x1010>(pair, pair); }
DEVICE u32 both_high(u32 pair) { return prmt<0x3232>(pair, pair); }

// ---- 16-bit arithmetic on pairs ----

template <Dtype T>
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  if constexpr (T == Dtype::f16)
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// bf16 add and mul exist from sm_90 on only; as fma they exist everywhere and cost the same. -0 keeps a zero's sign.
template <Dtype T>
DEVICE u32 add2(u32 a, u32 b) {
  return fma2<T>(a, T == Dtype::f16 ? 0x3C003C00u : 0x3F803F80u, b);
}
template <Dtype T>
DEVICE u32 mul2(u32 a, u32 b) {
  return fma2<T>(a, b, 0x80008000u);
}

// As one instruction of the multiplier, whatever the factor.
DEVICE u32 multiply(u32 a, u32 b) {
  u32 d;
  asm("mul.lo.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// The larger of two unsigned numbers, for each half.
DEVICE u32 max2(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  u32 d;
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return max(a & 0xFFFFu, b & 0xFFFFu) | max(a & 0xFFFF0000u, b & 0xFFFF0000u);
#endif
}

template <Dtype T>
DEVICE float to_float(u16 bits) {
  float f;
  if constexpr (T == Dtype::f16)
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  else
    f = __uint_as_float(u32(bits) << 16);
  return f;
}
#if __CUDA_ARCH__ < 800
DEVICE u16 bf16_of(float f);
#endif
template <Dtype T>
DEVICE u16 from_float(float f) {
  u16 bits;
  if constexpr (T == Dtype::f16)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
  else
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
#else
    bits = bf16_of(f);
#endif
  return bits;
}
// Two numbers rounded to a pair, the first in the low half.
template <Dtype T>
DEVICE u32 pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 pair;
  if constexpr (T == Dtype::f16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return from_float<T>(low) | u32(from_float<T>(high)) << 16;
#endif
}

// ---- tensor cores ----

#if __CUDA_ARCH__ < 800
// d[16, 8] += a[16, 8] b[8, 8] of f16. Lane 4g + t holds a0 (row g, k 2t 2t+1), a1 (row g+8), b (k 2t 2t+1, column g).
DEVICE void mma_k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}
// d[8, 8] += a[8, 16] b[16, 8] of s8, lanes as in turing.cuh.
DEVICE void mma_s8_m8(int& d0, int& d1, u32 a, u32 b) {
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
               : "+r"(d0), "+r"(d1)
               : "r"(a), "r"(b));
}
#else
// d[16, 8] += a[16, 16] b[16, 8]. Lane 4g + t holds a0 (row g, k 2t 2t+1), a1 (row g+8), a2 (row g, k + 8), a3 (g+8, k + 8);
// b0 (k 2t 2t+1, column g), b1 (k + 8); d0 d1 (row g, columns 2t 2t+1), d2 d3 (row g+8).
template <Dtype T>
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (T == Dtype::f16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Four 8 x 8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void ldmatrix4(u32 (&d)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address));
}

// ---- memory ----

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

#if __CUDA_ARCH__ >= 800
#define L2_AHEAD ".L2::256B"
#else
#define L2_AHEAD ""
#endif

// 4, 8 or 16 bytes into WORDS registers, which keep what they had where they are not wanted: a predicate, not a branch.
// ONCE: bytes that nobody in the block reads again go past L1.
template <bool ONCE, int WORDS>
DEVICE void load_if(u32* to, const void* from, bool wanted) {
  static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4);
  if constexpr (WORDS == 1)
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.nc.b32 %0, [%1];}"
                 : "+r"(to[0])
                 : "l"(from), "r"(u32(wanted)));
  else if constexpr (WORDS == 2)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %3, 0; @p ld.global.nc" L2_AHEAD ".v2.u32 {%0, %1}, [%2];}"
        : "+r"(to[0]), "+r"(to[1])
        : "l"(from), "r"(u32(wanted)));
  else if constexpr (ONCE)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %5, 0;"
        "@p ld.global.nc.L1::no_allocate" L2_AHEAD ".v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "l"(from), "r"(u32(wanted)));
  else
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.nc" L2_AHEAD ".v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "l"(from), "r"(u32(wanted)));
}

// Asks for the line of a number in L2, and waits for nothing.
DEVICE void prefetch(const void* from, bool wanted) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p prefetch.global.L2 [%0];}" ::"l"(from), "r"(u32(wanted)));
}

// Not past the read-only cache: x may still be written when a kernel that overlaps the one before it starts.
DEVICE u32 load_or_zero(const u32* from, bool wanted) {
  u32 v;
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.b32 %0, [%1];}"
      : "=r"(v)
      : "l"(from), "r"(u32(wanted)));
  return v;
}

#if __CUDA_ARCH__ < 800
DEVICE void store_shared16(u32 to, const u32 (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
DEVICE void store_shared4(u32 to, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
#include "turing.cuh"
#else
// 16 bytes to shared memory, of which the first `bytes` are read and the rest are zero.
DEVICE void copy16(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same through L1, for what other warps of the SM read too; all of it or zeros.
DEVICE void copy16_or_zero(u32 to, const void* from, bool wanted) {
  asm volatile(
      "{.reg .pred p; setp.eq.b32 p, %2, 0; cp.async.ca.shared.global.L2::128B [%0], [%1], 16, p;}" ::"r"(to), "l"(from),
      "r"(u32(wanted))
      : "memory");
}
// The same, or nothing at all.
DEVICE void copy16_or_zero_if(u32 to, const void* from, bool wanted, bool any) {
  asm volatile(
      "{.reg .pred p, q; setp.eq.b32 p, %2, 0; setp.ne.b32 q, %3, 0;"
      "@q cp.async.ca.shared.global.L2::128B [%0], [%1], 16, p;}" ::"r"(to), "l"(from), "r"(u32(wanted)), "r"(u32(any))
      : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#endif

// ---- named barriers of `threads` threads; 0 is __syncthreads' ----

DEVICE void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
DEVICE void report(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// ---- clusters of blocks, from sm_90 on ----

#if __CUDA_ARCH__ >= 900
// All threads of a cluster.
DEVICE void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Nobody ends before the others have read its shared memory; no more than that.
DEVICE void leave_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}
// Four sums at a place of shared memory, of the cluster's block `rank`.
DEVICE float4 load_of_block(u32 from, int rank) {
  float4 v;
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(from), "r"(rank)
      : "memory");
  return v;
}
#else
DEVICE void meet_cluster() {}
DEVICE void leave_cluster() {}
DEVICE float4 load_of_block(u32, int) { return {}; }
#endif

// ---- overlapping with the kernels before and after (Stage.overlap) ----

// The next kernel's blocks may start where this one's have left room. Its own wait holds back all but reading weights.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Until the kernel before is done and what it wrote is visible. Nothing but weights may be touched earlier; reads
// through `p` depend on it, so that no compiler moves them up.
template <typename T>
DEVICE void wait_for_previous(T*& p) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : "+l"(p)::"memory");
#endif
}

// One more arrival at a counter; the old count. Orders what the block wrote before with what the last one reads after.
DEVICE u32 arrive(u32* counter) {
  u32 old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(old) : "l"(counter) : "memory");
  return old;
}
