// Stands in for kernels/hopper.cuh. What the hardware may do late is done as late as it may: a copy's bytes arrive when no
// thread can run any more (with a seed: some rounds later, in any order), and until then its place holds NaNs; a wgmma
// reads registers and shared memory when a thread waits for it. So what is read or overwritten too early shows.
#pragma once
#include <map>
#include "mma.cuh"

#define __grid_constant__
using std::fmaf;

// ---- roles ----

template <int REGISTERS>
void registers_release() {}
template <int REGISTERS>
void registers_take() {}
inline bool elected() {
  warp_wait();
  return threadIdx.x % 32 == 0;
}
inline int uniform(int v) { return __shfl_sync(~0u, v, 0, 32); }
inline int fresh_lane() { return threadIdx.x % 32; }

inline bool __any_sync(u32, bool v) {
  Warp& w = warp_here();
  w.address[threadIdx.x % 32] = v;
  warp_wait();
  const bool any = std::any_of(w.address, w.address + 32, [](u32 each) { return each; });
  warp_wait();
  return any;
}
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
// Partial sums: where they may be written they may be read.
inline void __stcg(float4* to, float4 v) {
  check(to, 16, 16);
  *to = v;
}
inline float4 load_partial(const float4* from) { return __ldg(from); }
inline u32 arrived(const u32* counter) { return __ldg(counter); }

inline void store_shared_at(u32 to, int block, float4 v) {
  shared_at(to, 16, 16);
  const u32 there = to % WINDOW + block * WINDOW;
  if (u32(block) >= blocks || alive[block] == 0) refuse("a store to shared memory of block %d, which has ended", block);
  std::memcpy(shared + there, &v, 16);
}

// ---- mbarriers ----

struct Mbarrier {
  int arrivals, left, bytes; // of a phase; still to come; the same, of copies
  u32 phase;
};
inline std::map<u32, Mbarrier> mbarriers; // by address
inline Mbarrier& mbarrier(u32 address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) refuse("no mbarrier at %u", address);
  if (alive[address / WINDOW] == 0) refuse("the mbarrier at %u is of a block that has ended", address);
  return found->second;
}
inline void end_phase(Mbarrier& b) {
  if (b.left == 0 && b.bytes == 0) b.left = b.arrivals, b.phase++;
}
inline void arrive_at(u32 address, int bytes) {
  Mbarrier& b = mbarrier(address);
  if (b.left-- == 0) refuse("more than %d arrivals at the mbarrier at %u", b.arrivals, address);
  b.bytes += bytes;
  end_phase(b);
}
inline void barrier_init(u32 barrier, u32 arrivals) {
  shared_at(barrier, 8, 8);
  mbarriers[barrier] = {int(arrivals), int(arrivals), 0, 0};
}
inline void barrier_init_done() {}
inline void barrier_arrive(u32 barrier) { shared_at(barrier, 8, 8), arrive_at(barrier, 0); }
inline void barrier_arrive_at(u32 barrier, int to) {
  shared_at(barrier, 8, 8), arrive_at(barrier % WINDOW + to * WINDOW, 0);
}
inline void barrier_expect(u32 barrier, u32 bytes) { shared_at(barrier, 8, 8), arrive_at(barrier, bytes); }
inline void barrier_wait(u32 barrier, u32 parity) {
  shared_at(barrier, 8, 8);
  const Mbarrier& b = mbarrier(barrier);
  while (b.phase % 2 == parity) wait_for_change(b.phase, "the mbarrier at", barrier);
}

// ---- copies ----

// What CUtensorMap says, of 16-bit numbers in 128-byte swizzled boxes of 64 columns; host_kernels.py writes it.
struct alignas(64) TensorMap {
  const u8* from;
  i64 rows, columns, stride; // stride in bytes
  i64 box_rows, box_columns;
  u8 bytes[80];
};
static_assert(sizeof(TensorMap) == 128);

// 16 bytes that are on their way.
struct Piece {
  u32 to;
  u8 bytes[16];
};
struct Copy {
  std::vector<Piece> pieces;
  u32 barrier, due;
};
inline std::vector<Copy> copies;

inline void start(std::vector<Piece> pieces, u32 barrier) {
  mbarrier(barrier);
  for (const Piece& piece : pieces) std::memset(shared + piece.to, 0xFF, 16);
  copies.push_back({std::move(pieces), barrier, seed ? now + 1 + drawn(40) : ~0u});
}
inline void finish_copy(u32 i) {
  for (const Piece& piece : copies[i].pieces) std::memcpy(shared + piece.to, piece.bytes, 16);
  Mbarrier& b = mbarrier(copies[i].barrier);
  b.bytes -= 16 * copies[i].pieces.size();
  end_phase(b);
  copies.erase(copies.begin() + i);
}
inline bool some_copies(bool stuck) {
  bool any = false;
  for (u32 i = 0; i < copies.size();)
    if (copies[i].due <= now)
      finish_copy(i), any = true;
    else
      i++;
  if (!any && stuck && !copies.empty()) finish_copy(seed ? drawn(copies.size()) : 0), any = true;
  return any;
}

inline void prefetch(const TensorMap& map) {
  if (u64(&map) % 64) refuse("a tensor map that is not aligned");
}
inline void prefetch_bulk(const void* from, u32 bytes) {
  if (bytes == 0 || bytes % 16) refuse("a prefetch of %u bytes", bytes);
  check(from, bytes, 16);
}
inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  prefetch_bulk(from, bytes);
  shared_at(to, bytes, 16);
  std::vector<Piece> pieces(bytes / 16);
  for (u32 i = 0; i < bytes / 16; i++) {
    pieces[i].to = to + 16 * i;
    std::memcpy(pieces[i].bytes, static_cast<const u8*>(from) + 16 * i, 16);
  }
  start(std::move(pieces), barrier);
}
// Bits 4 to 6 of an address, xor bits 7 to 9.
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
// To the same place of `count` blocks from `first` on.
inline void copy_box(u32 to, const TensorMap& map, int column, int row, u32 barrier, u32 first, u32 count) {
  prefetch(map);
  if (map.box_columns != 64 || u64(map.from) % 16 || map.stride % 16) refuse("no such tensor map");
  check(map.from, (map.rows - 1) * map.stride + 2 * map.columns, 16);
  shared_at(to, map.box_rows * 128, 128), shared_at(barrier, 8, 8);
  for (u32 block = first; block < first + count; block++) {
    const u32 up = block * WINDOW;
    std::vector<Piece> pieces;
    for (int r = 0; r < map.box_rows; r++)
      for (int c = 0; c < 8; c++) {
        Piece piece = {swizzled(to % WINDOW + r * 128 + c * 16) + up, {}};
        for (int i = 0; i < 8; i++) {
          const i64 y = row + r, x = column + c * 8 + i;
          if (y >= 0 && y < map.rows && x >= 0 && x < map.columns) std::memcpy(piece.bytes + 2 * i, map.from + y * map.stride + 2 * x, 2);
        }
        pieces.push_back(piece);
      }
    start(std::move(pieces), barrier % WINDOW + up);
  }
}
inline void copy_box(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
  copy_box(to, map, column, row, barrier, rank, 1);
}
template <int BLOCKS>
void copy_box_to_all(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
  copy_box(to, map, column, row, barrier, 0, BLOCKS);
}

// ---- wgmma: one thread of a warp multiplies for all, once they wait for it ----

inline u64 swizzled_tile(u32 address) {
  return u64(1) << 62 | u64(1024 >> 4) << 32 | 1u << 16 | (address & 0x3FFFF) >> 4;
}

struct Product {
  u64 b;
  u32 tokens, adds, group;
  double (*number)(u16);
  float* d[32];
  const u32* a[32];
};
// Of a warp. What its warpgroup has in common: each warp has made the same products in each group.
struct Products {
  std::vector<Product> waiting;
  u32 issued[32], committed[32];
  bool fenced[32];
  u64 sign[4]; // of the latest groups
};
inline Products products[BLOCKS_AT_ONCE][32];
inline Products& products_here() { return products[rank][threadIdx.x / 32]; }

inline void multiply(const Product& p) {
  const u32 start = u32(p.b << 4) & 0x3FFFF, group_of_8 = u32(p.b >> 32 & 0x3FFF) << 4;
  if (p.b >> 62 != 1 || p.b >> 49 & 7) refuse("a descriptor that is not of a 128-byte swizzled tile at 0");
  static float a[16][16], b[256][16];
  for (u32 row = 0; row < 16; row++)
    for (u32 k = 0; k < 16; k++)
      a[row][k] = p.number(p.a[4 * (row % 8) + k % 8 / 2][row / 8 + 2 * (k / 8)] >> 16 * (k % 2));
  for (u32 token = 0; token < p.tokens; token++)
    for (u32 k = 0; k < 16; k++) {
      u16 bits;
      const u32 at = swizzled(start + token / 8 * group_of_8 + token % 8 * 128 + 2 * k);
      std::memcpy(&bits, shared_at(at + rank * WINDOW, 2, 2), 2);
      b[token][k] = p.number(bits);
    }
  for (u32 lane = 0; lane < 32; lane++)
    for (u32 i = 0; i < p.tokens / 2; i++) {
      const float* row = a[lane / 4 + i % 4 / 2 * 8];
      const float* column = b[i / 4 * 8 + lane % 4 * 2 + i % 2];
      double sum = p.adds ? p.d[lane][i] : 0;
      for (u32 k = 0; k < 16; k++) sum += double(row[k]) * column[k];
      p.d[lane][i] = float(sum);
    }
}

template <Dtype T, int TOKENS, bool ADD = true>
void wgmma(float (&d)[TOKENS / 2], const u32 (&a)[4], u64 b) {
  Products& all = products_here();
  const u32 lane = threadIdx.x % 32, i = all.issued[lane]++;
  if (!all.fenced[lane]) refuse("a wgmma without a fence");
  if (i == all.waiting.size()) all.waiting.push_back({b, TOKENS, ADD, all.committed[lane], value<T>});
  Product& p = all.waiting[i];
  if (p.b != b || p.tokens != TOKENS || p.adds != ADD || p.group != all.committed[lane]) refuse("lanes make different wgmmas");
  p.d[lane] = d, p.a[lane] = a;
}
inline void wgmma_fence() { products_here().fenced[threadIdx.x % 32] = true; }
inline void wgmma_commit() {
  warp_wait();
  Products& all = products_here();
  const u32 lane = threadIdx.x % 32, group = all.committed[lane]++;
  if (lane) return;
  u64 sign = 0;
  for (const Product& p : all.waiting)
    if (p.group == group) sign = (sign ^ p.b ^ p.tokens << 1 ^ p.adds) * 0x9E3779B97F4A7C15u;
  all.sign[group % 4] = sign;
}
template <int PENDING>
void wgmma_wait() {
  Products& all = products_here();
  const u32 lane = threadIdx.x % 32, until = all.committed[lane] - PENDING; // groups
  Products* warpgroup = &products[rank][threadIdx.x / 128 * 4];
  for (int w = 0; w < 4; w++)
    while (int(warpgroup[w].committed[0] - until) < 0) wait_for_change(warpgroup[w].committed[0], "the warpgroup's groups of wgmma,", until);
  warp_wait();
  if (lane == 0) {
    if (std::any_of(all.issued, all.issued + 32, [&](u32 each) { return each != all.waiting.size(); }))
      refuse("lanes make different wgmmas");
    for (int w = 0; w < 4 && until; w++)
      if (warpgroup[w].sign[(until - 1) % 4] != all.sign[(until - 1) % 4]) refuse("warps of a warpgroup make different wgmmas");
    auto done = all.waiting.begin();
    for (; done != all.waiting.end() && int(done->group - until) < 0; done++) multiply(*done);
    for (u32& each : all.issued) each -= done - all.waiting.begin();
    all.waiting.erase(all.waiting.begin(), done);
  }
  warp_wait();
  all.fenced[lane] = false;
}
template <int N>
void pin(float (&)[N]) {}

inline void stmatrix4_transposed(u32 address, const u32 (&d)[4]) {
  Warp& w = warp_here();
  const u32 lane = threadIdx.x % 32;
  shared_at(address, 16, 16), w.address[lane] = address;
  warp_wait();
  for (u32 i = 0; i < 8; i++) {
    const u16 number = d[i / 2] >> 16 * (i % 2);
    std::memcpy(shared + w.address[i / 2 * 8 + lane % 4 * 2 + i % 2] + lane / 4 * 2, &number, 2);
  }
  warp_wait();
}

// ---- a cluster begins and ends ----

inline void nothing_yet() {
  std::memset(named, 0, sizeof named);
  mbarriers.clear(), copies.clear();
  for (auto& block : products)
    for (Products& p : block) p = {};
}
inline void nothing_left() {
  if (!copies.empty()) refuse("%zu copies are on their way to a block that has ended", copies.size());
  for (auto [address, b] : mbarriers)
    if (b.bytes) refuse("the mbarrier at %u still expects %d bytes", address, b.bytes);
  for (auto& block : products)
    for (Products& p : block)
      if (!p.waiting.empty()) refuse("nobody waited for a wgmma");
}
inline const bool has_copies = (begin_cluster = nothing_yet, progress = some_copies, end_cluster = nothing_left, true);
