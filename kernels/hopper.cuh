// The instructions only sm_90a has, one function each: wgmma, mbarriers, bulk copies. Nothing here knows a layout.
#pragma once
#include "mma.cuh"

// ---- roles ----

// Hands registers over between warpgroups; needs a maximum of one block in __launch_bounds__ and one if / else of roles.
template <int REGISTERS>
DEVICE void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
// True in one lane of a whole warp. The compiler knows this form, and keeps what is the same in all lanes uniform.
DEVICE bool elected() {
  u32 yes;
  asm volatile("{ .reg .pred yes; elect.sync _|yes, 0xFFFFFFFF; selp.u32 %0, 1, 0, yes; }" : "=r"(yes));
  return yes;
}
// A number that is the same in all lanes, told to the compiler: what is made from it costs one lane's work, not 32's.
DEVICE int uniform(int v) { return __shfl_sync(~0u, v, 0); }
// The lane, read again each time: nothing made from it is kept in registers through a main loop that has none to spare.
DEVICE int fresh_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// The arrivals at a counter so far (mma.cuh's arrive), and what those that arrived wrote before.
DEVICE u32 arrived(const u32* counter) {
  u32 count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// Four partial sums that another block wrote, past L1.
DEVICE float4 load_partial(const float4* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}

// Into shared memory of the cluster's block `rank`, in the place that `to` is here.
DEVICE void store_shared_at(u32 to, int rank, float4 v) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5}; }" ::"r"(to),
      "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

// ---- mbarriers; addresses are shared memory's own 32-bit ones ----

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier in the same place of the cluster's block `rank`.
DEVICE void barrier_arrive_at(u32 barrier, int rank) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Arrives, and makes the phase wait for `bytes` from bulk copies too.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Returns when the phase of this parity is over.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- the copy engine: global -> shared, reporting bytes to a barrier ----

// A CUtensorMap, passed by value as a __grid_constant__ parameter: through a pointer to global memory it faults.
struct alignas(64) TensorMap {
  u8 bytes[128];
};
DEVICE void prefetch(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// `bytes` is a multiple of 16, and so are both addresses.
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// The same into L2 only.
DEVICE void prefetch_bulk(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// The map's box at (column, row); what lies outside the matrix arrives as zeros and is counted like the rest.
DEVICE void copy_box(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same into the same place of every block of the cluster, and to the same barrier there.
template <int BLOCKS>
DEVICE void copy_box_to_all(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(u16((1 << BLOCKS) - 1))
      : "memory");
}

// ---- wgmma: d[64, TOKENS] += a[64, 16] b[16, TOKENS], a in registers, b in shared memory ----
//
// Warp w of the warpgroup holds rows 16w .. 16w + 15: a as in mma.cuh; d[4i .. 4i + 3] are rows g, g, g + 8, g + 8 and
// columns 8i + 2t, + 1, + 0, + 1 of lane 4g + t.

// The descriptor of b: rows (tokens) of 64 16-bit k, 128 bytes each, swizzled as a 128-byte box arrives; 8 rows are
// 1024 bytes. The tile is 1024-byte aligned; the next 16 k begin 32 bytes on. Only the low word depends on the address.
DEVICE u64 swizzled_tile(u32 address) {
  constexpr u32 SWIZZLE_128 = 1u << 30, STRIDE = 1024 >> 4, LEADING = 1u << 16;
  u64 descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"((address & 0x3FFFF) >> 4 | LEADING), "r"(SWIZZLE_128 | STRIDE));
  return descriptor;
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving accumulators over a fence or a wait.
template <int N>
DEVICE void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define OUT8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define OUT16(i) OUT8(i), OUT8(i + 8)
#define OUT32(i) OUT16(i), OUT16(i + 16)
#define OUT64(i) OUT32(i), OUT32(i + 32)
#define OUT128(i) OUT64(i), OUT64(i + 64)
#define REGS8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define REGS16 REGS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define REGS32 REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGS64 \
  REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
         ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGS128 \
  REGS64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90" \
         ",%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113" \
         ",%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// A0..: numbers of the operands after the accumulators: a's four and the descriptor.
#define WGMMA(TYPE, TOKENS, ADD, REGS, OUT, A0, A1, A2, A3, B)                                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" TOKENS "k16.f32." TYPE "." TYPE                           \
               " {" REGS "}, {" A0 "," A1 "," A2 "," A3 "}, " B ", " ADD ", 1, 1, 0;"                    \
               : OUT                                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define WGMMA_OF(TYPE, ADD)                                                                                     \
  if constexpr (TOKENS == 16)                                                                                \
    WGMMA(TYPE, "16", ADD, REGS8, OUT8(0), "%8", "%9", "%10", "%11", "%12");                               \
  else if constexpr (TOKENS == 32)                                                                           \
    WGMMA(TYPE, "32", ADD, REGS16, OUT16(0), "%16", "%17", "%18", "%19", "%20");                           \
  else if constexpr (TOKENS == 64)                                                                           \
    WGMMA(TYPE, "64", ADD, REGS32, OUT32(0), "%32", "%33", "%34", "%35", "%36");                           \
  else if constexpr (TOKENS == 128)                                                                          \
    WGMMA(TYPE, "128", ADD, REGS64, OUT64(0), "%64", "%65", "%66", "%67", "%68");                          \
  else                                                                                                       \
    WGMMA(TYPE, "256", ADD, REGS128, OUT128(0), "%128", "%129", "%130", "%131", "%132")

// ADD: false begins the sums anew.
template <Dtype T, int TOKENS, bool ADD = true>
DEVICE void wgmma(float (&d)[TOKENS / 2], const u32 (&a)[4], u64 b) {
  static_assert(TOKENS == 16 || TOKENS == 32 || TOKENS == 64 || TOKENS == 128 || TOKENS == 256);
  if constexpr (T == Dtype::f16 && ADD) {
    WGMMA_OF("f16", "1");
  } else if constexpr (T == Dtype::f16) {
    WGMMA_OF("f16", "0");
  } else if constexpr (ADD) {
    WGMMA_OF("bf16", "1");
  } else {
    WGMMA_OF("bf16", "0");
  }
}
#undef WGMMA_OF
#undef WGMMA

// Four 8 x 8 matrices of 16-bit numbers, stored transposed; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void stmatrix4_transposed(u32 address, const u32 (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(d[0]),
               "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
}
