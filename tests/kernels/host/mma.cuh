// Stands in for kernels/mma.cuh, so that a kernel's own source runs on the host: threads are fibers (threads.cuh), and
// warp instructions are two barriers with an exchange between them. Slow, exact, no GPU.
#pragma once
#include <algorithm>
#include <cmath>

#define DEVICE inline
#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __align__(n)
#define __launch_bounds__(...)
#include "elements.h"
#include "threads.cuh"

using std::max, std::min;

struct uint2 {
  u32 x, y;
};
struct float2 {
  float x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};

template <class T>
T __ldg(const T* from) {
  check(from, sizeof(T), sizeof(T));
  return *from;
}
template <class T>
T __ldcg(const T* from) { return __ldg(from); }

inline u32 __umulhi(u32 a, u32 b) { return u64(a) * b >> 32; }
inline float __uint_as_float(u32 bits) { return __builtin_bit_cast(float, bits); }
inline u32 __float_as_uint(float f) { return __builtin_bit_cast(u32, f); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }

template <class T>
T __shfl_sync(u32, T v, int from, int width) {
  Warp& w = warp_here();
  const u32 lane = threadIdx.x % 32;
  w.address[lane] = __builtin_bit_cast(u32, v);
  warp_wait();
  const T got = __builtin_bit_cast(T, w.address[lane / width * width + from]);
  warp_wait();
  return got;
}
template <class T>
T __shfl_xor_sync(u32, T v, int other) {
  Warp& w = warp_here();
  w.address[threadIdx.x % 32] = __builtin_bit_cast(u32, v);
  warp_wait();
  const T got = __builtin_bit_cast(T, w.address[threadIdx.x % 32 ^ other]);
  warp_wait();
  return got;
}

// ---- named barriers ----

struct Named {
  Barrier barrier;
  u32 threads;
};
inline Named named[BLOCKS_AT_ONCE][16];
inline Barrier& arriving(int barrier, int threads) {
  if (barrier < 1 || barrier > 15 || threads % 32) refuse("no barrier %d of %d threads", barrier, threads);
  Named& n = named[rank][barrier];
  if (n.barrier.arrived == 0) n.threads = threads;
  if (n.threads != u32(threads)) refuse("barrier %d of %d threads, which others have as %u", barrier, threads, n.threads);
  return n.barrier;
}
inline void meet(int barrier, int threads) { wait(arriving(barrier, threads), threads, "a named barrier, threads:"); }
inline void report(int barrier, int threads) {
  Barrier& b = arriving(barrier, threads);
  if (++b.arrived == u32(threads)) b = {0, b.turn + 1};
}

// ---- clusters of blocks ----

inline void meet_cluster() { wait(of_cluster, blocks * blockDim.x, "the cluster, threads:"); }
inline void leave_cluster() { meet_cluster(); }
inline float4 load_of_block(u32 from, int to) {
  float4 v;
  std::memcpy(&v, shared + from % WINDOW + to * WINDOW, sizeof v);
  return v;
}

template <int LUT>
u32 lop3(u32 a, u32 b, u32 c) {
  u32 d = 0;
  for (int i = 0; i < 8; i++)
    if (LUT >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return d;
}
constexpr int AND_OR = 0xEA, AND_XOR = 0x6A;
template <int SELECT>
u32 prmt(u32 a, u32 b) {
  u32 d = 0;
  for (int i = 0; i < 4; i++) d |= u32((u64(b) << 32 | a) >> 8 * (SELECT >> 4 * i & 7) & 0xFF) << 8 * i;
  return d;
}
inline u32 twice(u32 pair, int half) { return (pair >> 16 * half & 0xFFFFu) * 0x10001u; }
inline u32 multiply(u32 a, u32 b) { return a * b; }
inline u32 max2(u32 a, u32 b) { return std::max(a & 0xFFFFu, b & 0xFFFFu) | std::max(a & 0xFFFF0000u, b & 0xFFFF0000u); }
inline u32 both_low(u32 pair) { return prmt<0x1010>(pair, pair); }
inline u32 both_high(u32 pair) { return prmt<0x3232>(pair, pair); }

template <Dtype T>
double value(u16 bits) {
  if constexpr (T == Dtype::f16) return double(__builtin_bit_cast(_Float16, bits));
  return __uint_as_float(u32(bits) << 16);
}
template <Dtype T>
u16 rounded(double v) {
  if constexpr (T == Dtype::f16) return __builtin_bit_cast(u16, _Float16(v));
  const u32 bits = __builtin_bit_cast(u32, float(v));
  return u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
template <Dtype T>
float to_float(u16 bits) { return float(value<T>(bits)); }
#if __CUDA_ARCH__ < 800
inline u16 bf16_of(float f);
#endif
template <Dtype T>
u16 from_float(float f) {
#if __CUDA_ARCH__ < 800
  if constexpr (T == Dtype::bf16) return bf16_of(f);
#endif
  return rounded<T>(f);
}
template <Dtype T>
u32 pack(float low, float high) { return from_float<T>(low) | u32(from_float<T>(high)) << 16; }
template <Dtype T>
u32 fma2(u32 a, u32 b, u32 c) {
  auto one = [&](int up) { return u32(rounded<T>(value<T>(a >> up) * value<T>(b >> up) + value<T>(c >> up))) << up; };
  return one(0) | one(16);
}
template <Dtype T>
u32 add2(u32 a, u32 b) { return fma2<T>(a, T == Dtype::f16 ? 0x3C003C00u : 0x3F803F80u, b); }
template <Dtype T>
u32 mul2(u32 a, u32 b) { return fma2<T>(a, b, 0x80008000u); }

// Sums over k of a, b: element (row, k) of A is in lane 4 (row % 8) + k % 8 / 2, register row / 8 + 2 (k / 8); (k,
// column) of B likewise.
template <Dtype T>
void mma_pairs(float (&d)[4], const u32* a, const u32* b, int depth) {
  Warp& w = warp_here();
  const int lane = threadIdx.x % 32;
  std::copy(a, a + depth / 4, w.a[lane]);
  std::copy(b, b + depth / 8, w.b[lane]);
  warp_wait();
  for (int c = 0; c < 4; c++) {
    const int row = lane / 4, half = c / 2, column = lane % 4 * 2 + c % 2;
    double sum = d[c];
    for (int k = 0; k < depth; k++)
      sum += value<T>(w.a[4 * row + k % 8 / 2][half + k / 8 * 2] >> 16 * (k % 2)) *
             value<T>(w.b[4 * column + k % 8 / 2][k / 8] >> 16 * (k % 2));
    d[c] = float(sum);
  }
  warp_wait();
}
#if __CUDA_ARCH__ < 800
// The instructions of sm_75, as its data sheet has them; kernels/turing.cuh makes the others of them.
inline void mma_k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  const u32 a[2] = {a0, a1};
  mma_pairs<Dtype::f16>(d, a, &b, 8);
}
inline void mma_s8_m8(int& d0, int& d1, u32 a, u32 b) {
  Warp& w = warp_here();
  const int lane = threadIdx.x % 32;
  w.a[lane][0] = a, w.b[lane][0] = b;
  warp_wait();
  int* d[2] = {&d0, &d1};
  for (int c = 0; c < 2; c++)
    for (int k = 0; k < 16; k++) {
      auto number = [&](u32 word) { return static_cast<signed char>(word >> 8 * (k % 4)); };
      *d[c] += number(w.a[lane / 4 * 4 + k / 4][0]) * number(w.b[(lane % 4 * 2 + c) * 4 + k / 4][0]);
    }
  warp_wait();
}
#else
template <Dtype T>
void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 b[2] = {b0, b1};
  mma_pairs<T>(d, a, b, 16);
}
#endif

inline void ldmatrix4(u32 (&d)[4], u32 address) {
  Warp& w = warp_here();
  const int lane = threadIdx.x % 32;
  w.address[lane] = address;
  warp_wait();
  for (int i = 0; i < 4; i++) std::memcpy(&d[i], shared + w.address[8 * i + lane / 4] + lane % 4 * 4, 4);
  warp_wait();
}

template <bool ONCE, int WORDS>
void load_if(u32* to, const void* from, bool wanted) {
  if (!wanted) return;
  check(from, 4 * WORDS, 4 * WORDS);
  std::memcpy(to, from, 4 * WORDS);
}
inline void prefetch(const void* from, bool wanted) {
  if (wanted) check(from, 1, 1);
}
inline u32 load_or_zero(const u32* from, bool wanted) { return wanted ? __ldg(from) : 0; }
#if __CUDA_ARCH__ < 800
inline void store_shared16(u32 to, const u32 (&v)[4]) { std::memcpy(shared + to, v, 16); }
inline void store_shared4(u32 to, u32 v) { std::memcpy(shared + to, &v, 4); }
#include "turing.cuh"
#else
inline void copy16(u32 to, const void* from, int bytes) {
  if (bytes) check(from, bytes, 16);
  std::memset(shared + to, 0, 16);
  std::memcpy(shared + to, from, bytes);
}
inline void copy16_or_zero(u32 to, const void* from, bool wanted) { copy16(to, from, wanted ? 16 : 0); }
inline void copy16_or_zero_if(u32 to, const void* from, bool wanted, bool any) {
  if (any) copy16_or_zero(to, from, wanted);
}
inline void copy_commit() {}
template <int PENDING>
void copy_wait() {}
#endif
inline void let_next_start() {}
template <typename T>
void wait_for_previous(T*&) {}
inline u32 arrive(u32* counter) { return (*counter)++; }
