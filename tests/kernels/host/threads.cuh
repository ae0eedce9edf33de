// Threads, shared memory and barriers of the host's kernels: a thread is a fiber, and all that run at once (a block, or a
// cluster of them) take turns in one thread of the host. A fiber gives its turn away only where it has to wait.
#pragma once
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct Extent {
  u32 x, y, z;
};
inline Extent threadIdx, blockIdx, blockDim, gridDim;
constexpr u32 BLOCKS_AT_ONCE = 4, WINDOW = 256 << 10; // of a cluster; shared addresses of each
alignas(1024) inline u8 shared[BLOCKS_AT_ONCE * WINDOW];
inline u32 rank, blocks, bytes_of_block; // the running block's place in its cluster; of the launch
inline u8* shared_of_block() { return shared + rank * WINDOW; }
inline u32 shared_address(const void* p) { return u32(static_cast<const u8*>(p) - shared); }

// Ends the process with a word.
inline void refuse(const char* why, ...) {
  va_list given;
  va_start(given, why);
  std::fprintf(stderr, "block %u, thread %u: ", blockIdx.x, threadIdx.x);
  std::vfprintf(stderr, why, given);
  std::fputc('\n', stderr);
  std::_Exit(1); // on a fiber's stack
}

// Memory a kernel may read.
inline std::vector<std::pair<const u8*, const u8*>> readable;
inline void check(const void* from, i64 bytes, int alignment) {
  const u8* at = static_cast<const u8*>(from);
  for (auto [begin, end] : readable)
    if (at >= begin && at + bytes <= end && u64(at) % alignment == 0) return;
  refuse("a read of %lld bytes is outside every tensor or not aligned", bytes);
}
// Shared memory by its address, which lies in the running block's own.
inline u8* shared_at(u32 address, u32 bytes, u32 alignment) {
  const u32 first = address - rank * WINDOW;
  if (first > bytes_of_block || bytes > bytes_of_block - first || address % alignment)
    refuse("%u bytes at %u of shared memory's %u, or not aligned to %u", bytes, first, bytes_of_block, alignment);
  return shared + address;
}

// ---- fibers ----

struct Fiber {
  ucontext_t start;
  jmp_buf here;
  bool started, finished;
  const u32* word; // what it waits for a change of, null where it can run
  u32 seen;
  const char* what; // for people
  u32 which;
};
inline Fiber fibers[BLOCKS_AT_ONCE * 1024];
inline Fiber* running;
inline jmp_buf scheduler;
inline void (*entry)();

// Numbers that look random and are the same every time.
inline u32 seed, state;
inline u32 drawn(u32 below) {
  state = state * 1664525u + 1013904223u;
  return u64(state >> 8) * below >> 24;
}

[[gnu::noinline]] inline void give_way() {
  if (!_setjmp(running->here)) _longjmp(scheduler, 1);
}
// Returns when the word is no longer what it is now.
inline void wait_for_change(const u32& word, const char* what, u32 which) {
  running->word = &word, running->seen = word, running->what = what, running->which = which;
  give_way();
}
inline void fiber() {
  entry();
  running->finished = true;
  _longjmp(scheduler, 1);
}
[[gnu::noinline]] inline void resume(Fiber& f) {
  running = &f, f.word = nullptr;
  if (_setjmp(scheduler)) return;
  if (f.started) _longjmp(f.here, 1);
  f.started = true;
  setcontext(&f.start);
}

// ---- barriers of whole blocks and warps ----

struct Barrier {
  u32 arrived, turn;
};
struct Warp {
  Barrier barrier;
  u32 a[32][4], b[32][2], address[32];
};
inline Barrier of_block[BLOCKS_AT_ONCE], of_cluster;
inline Warp warps[BLOCKS_AT_ONCE][32];

inline void wait(Barrier& barrier, u32 count, const char* what) {
  const u32 turn = barrier.turn;
  if (++barrier.arrived == count)
    barrier = {0, turn + 1};
  else
    wait_for_change(barrier.turn, what, count);
}
inline void __syncthreads() { wait(of_block[rank], blockDim.x, "the block, threads:"); }
inline Warp& warp_here() { return warps[rank][threadIdx.x / 32]; }
inline void warp_wait() { wait(warp_here().barrier, 32, "the warp, threads:"); }
inline void __syncwarp() { warp_wait(); }

// ---- what goes on beside the threads: hopper.cuh's copies ----

inline u32 now;                    // rounds of the scheduler
inline u32 alive[BLOCKS_AT_ONCE];  // threads that have not ended
inline void (*begin_cluster)();    // null where there is nothing
inline bool (*progress)(bool stuck); // whether something happened; `stuck`: no thread can run
inline void (*end_cluster)();

inline void report_waits(u32 threads) {
  std::fprintf(stderr, "no thread can run; cluster of block %u:\n", blockIdx.x);
  for (u32 i = 0, first = 0; i <= blocks * threads; i++) {
    const Fiber &f = fibers[i], &same = fibers[first];
    if (i < blocks * threads && i % 32 && f.finished == same.finished && f.what == same.what && f.which == same.which) continue;
    if (i > first && !same.finished)
      std::fprintf(stderr, "  block %u of the cluster, threads %u to %u wait for %s %u\n", first / threads, first % threads,
                   (i - 1) % threads, same.what, same.which);
    first = i;
  }
  std::_Exit(1);
}

// One cluster. With a seed the order of threads is another in each round, and warps pause now and then.
inline void run_cluster(u32 first_block, u32 columns, u32 threads) {
  constexpr int STACK = 64 << 10;
  static const std::unique_ptr<u8[]> stacks(new u8[u64(BLOCKS_AT_ONCE) * 1024 * STACK]); // pages come as they are touched
  const u32 count = blocks * threads;
  std::memset(shared, 0xFF, sizeof shared); // NaNs
  std::memset(of_block, 0, sizeof of_block);
  std::memset(warps, 0, sizeof warps);
  of_cluster = {}, now = 0;
  for (u32 i = 0; i < blocks; i++) alive[i] = threads;
  if (begin_cluster) begin_cluster();
  for (u32 i = 0; i < count; i++) {
    Fiber& f = fibers[i];
    f.started = f.finished = false, f.word = nullptr;
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = &stacks[u64(i) * STACK], f.start.uc_stack.ss_size = STACK;
    makecontext(&f.start, fiber, 0);
  }
  for (u32 left = count; left; now++) {
    bool moved = progress && progress(false);
    const u32 turned = seed ? drawn(count / 32) * 32 : 0;
    for (u32 w = 0; w < count; w += 32) {
      const u32 warp = (w + turned) % count;
      if (seed && drawn(4) == 0) { // a pause
        moved = true;
        continue;
      }
      for (u32 i = warp; i < warp + 32 && i < count; i++) {
        Fiber& f = fibers[i];
        if (f.finished || (f.word && *f.word == f.seen)) continue;
        rank = i / threads, threadIdx = {i % threads, 0, 0};
        blockIdx = {(first_block + rank) % columns, (first_block + rank) / columns, 0};
        resume(f);
        moved = true, left -= f.finished, alive[i / threads] -= f.finished;
      }
    }
    if (left && !moved && !(progress && progress(true))) report_waits(threads);
  }
  if (end_cluster) end_cluster();
  for (u32 i = 0; i < blocks; i++)
    for (u32 at = bytes_of_block; at < WINDOW; at++)
      if (shared[i * WINDOW + at] != 0xFF) refuse("a write behind the block's shared memory, at %u", at);
}

// Clusters one after the other, with an odd seed from the last to the first; `entry` calls the kernel in a fiber.
inline void launch(void (*kernel)(), u32 columns, u32 rows, u32 threads, u32 cluster, u32 bytes, u32 chosen) {
  entry = kernel, gridDim = {columns, rows, 1}, blockDim = {threads, 1, 1};
  blocks = cluster, bytes_of_block = bytes, seed = state = chosen;
  const u32 clusters = rows * columns / cluster;
  for (u32 i = 0; i < clusters; i++) run_cluster((seed % 2 ? clusters - 1 - i : i) * cluster, columns, threads);
}
