// The pipeline of kernels that decode weights straight into the A registers of wgmma.
//
//   a warpgroup multiplies 128 rows of W with the tokens of a tile; each of its warps takes 32 rows, two blocks of 16
//   one more warp fills rings of stages: x as swizzled boxes of 64 k, weights as they lie
//
//   A warp decodes one slice of 64 k while the slice before is multiplied:
//
//       issue slice 0 | decode slice 1 | wait for slice 0 | issue slice 1 | decode slice 2 | ...
//
//   In a cluster a warp takes one block, with twice the tokens: half the decoding. Its thread blocks have rows of W side
//   by side and the same x, of which each copies its part to all; L2 could not deliver it to each.
//
//   Where tiles are fewer than SMs, the thread blocks of a cluster are instead `deep`: they have one tile, each a part of
//   k. Each sends its sums to the others' shared memory, and finishes its share of the tokens.
//
//   The grid is persistent. Whole tiles go round the blocks; the last `split` tiles are cut along k into one even share
//   for each block, wherever that falls. The last warp to finish its part of a cut tile adds the parts in order of k, so
//   results do not depend on who was last.
//
// What W is, a kernel says in a struct, here K:
//
//   SHAPE, T       a block's tile; the type of x, y and the MMA
//   STEPS          steps of 64 k in a stage of weights: one, whose stage holds x too, or more, whose ring is of its own
//   RUN            steps that no cut parts: 2 where k is a multiple of 128, which spares half of the loop's conditions
//   SUMS           whether decoded weights lack a scale, which then multiplies the sums of each run
//   FACTOR         whether finished sums have a factor, which costs registers where parts of tiles are added
//   DECODING       registers that decoding takes beyond those of 4-bit integers with scales of x's type
//   Stage          what lies in shared memory of a stage of weights
//   Source         what lies in global memory
//   Copies         fills the stages of one tile from it
//   Decoder        a warp's: fragments of a slice, scales of sums
//   finish         multiplies finished sums with what is left of their scales
#pragma once
#include "decode.cuh"
#include "hopper.cuh"
#include "output.cuh"

constexpr int STEP = 64; // k of a stage of x
constexpr int BAND = 8;  // token tiles that go through all features together, so that x of these stays in L2

struct Shape {
  int features, tokens; // of a tile: 128 .. 512, 16 .. 256
  int ways;             // 2: a second set of warpgroups has the same features, and each takes every other run
  int cluster;          // thread blocks that share x
  int deep;             // thread blocks of one tile, each with its part of k; 1 where blocks share x
  int stages;           // of x, a power of two
  int weight_stages;    // the same, where weights have a ring of their own
};

constexpr int blocks_of(Shape s) { return s.cluster > 1 || s.deep > 1 ? 1 : 2; } // of 16 rows, of a warp
constexpr int warps_of(Shape s) { return s.features / (16 * blocks_of(s)); }     // of one way
constexpr int rows_out(int tokens) { return tokens < 32 ? tokens : 32; }         // tokens of y that go out together
constexpr int threads_of(Shape s) { return 32 * warps_of(s) * s.ways + 128; }
// Two warpgroups take turns, where that was seen to be faster: see TURN_OF.
constexpr bool turns(Shape s) { return s.tokens != 64 && s.ways == 1 && warps_of(s) == 8; }
// Registers of a thread after the roles have shared them out: setmaxnreg counts in eights and takes no less than 24.
constexpr int all_registers(Shape s) { return 65536 / threads_of(s) / 8 * 8 * threads_of(s); }
constexpr int consumer_registers(Shape s) { return (all_registers(s) - 24 * 128) / (threads_of(s) - 128) / 8 * 8; }
constexpr int producer_registers(Shape s) {
  return (all_registers(s) - consumer_registers(s) * (threads_of(s) - 128)) / 128 / 8 * 8;
}
template <class K>
constexpr int SUM_REGISTERS = K::SHAPE.tokens / 2 * blocks_of(K::SHAPE);
template <class K>
constexpr int SPARE = consumer_registers(K::SHAPE) - (K::SUMS ? 2 * SUM_REGISTERS<K> + 16 : SUM_REGISTERS<K>) - K::DECODING;
// 16 k's of a slice: what is decoded while the slice before is multiplied. As many as registers allow.
template <class K>
constexpr int DEPTH_OF = SPARE<K> > 96 ? 4 : SPARE<K> > 68 || K::STEPS > 1 ? 2 : 1;

template <class K>
using Sums = float[blocks_of(K::SHAPE)][K::SHAPE.tokens / 2];

template <class K>
struct alignas(1024) Shared {
  static constexpr Shape S = K::SHAPE;
  u8 x[S.stages][S.tokens * STEP * 2];
  typename K::Stage weights[S.weight_stages];
  u8 out[warps_of(S)][rows_out(S.tokens)][32 * blocks_of(S)];
  float4 sums[S.ways > 1 ? S.tokens / 4 : 1][S.ways > 1 ? S.features : 1]; // of the other way, a thread's side by side
  u64 full[S.stages], empty[S.stages];
  u64 given, taken; // sums of the other way: in place, and free again
  u64 weights_full[K::STEPS > 1 ? S.weight_stages : 1], weights_empty[K::STEPS > 1 ? S.weight_stages : 1];
};

// The steps of a block, counted from its first, go round the stages.
template <int STAGES>
struct Ring {
  static_assert((STAGES & STAGES - 1) == 0);
  static DEVICE int stage(u32 step) { return step % STAGES; }
  static DEVICE u32 parity(u32 step) { return step / STAGES % 2; }
};

// Units [begin, end) of a tile: runs, or stages of weights where these are longer.
struct Segment {
  int tile, begin, end;
};

// The block's part of k, where a tile has several.
template <int DEEP>
DEVICE int part_of_k() {
  return int(blockIdx.x) % DEEP;
}

// The segments of a worker, a thread block or a cluster, in the order in which every role goes through them: whole tiles
// first, so that all blocks read the same k at the same time, then its share of the last `split` tiles, which are cut
// evenly.
template <int CLUSTER, int DEEP>
struct Schedule {
  int whole, split, steps; // whole: tiles that are not cut; steps: of a tile
  int next_whole;
  u32 position; // next unit of the cut tiles

  DEVICE Schedule(int tiles, int split, int steps) : whole(tiles - split), split(split), steps(steps) {
    next_whole = me(), position = start(me());
  }
  static DEVICE int me() { return blockIdx.x / CLUSTER; }
  static DEVICE u32 workers() { return gridDim.x / CLUSTER; }
  // First unit of worker w's share; split * steps * workers < 2^32. The same in all lanes, which the division hides.
  DEVICE u32 start(u32 w) const { return uniform(u32(split * steps) * w / workers()); }
  // The worker whose share holds a unit.
  DEVICE int owner(u32 unit) const { return uniform(((unit + 1) * workers() - 1) / u32(split * steps)); }

  DEVICE bool next(Segment& s) {
    if constexpr (DEEP > 1) { // there is a cluster for each tile
      if (next_whole < 0) return false;
      const int part = uniform(next_whole % DEEP);
      s.tile = uniform(next_whole / DEEP), next_whole = -1;
      s.begin = steps * part / DEEP, s.end = steps * (part + 1) / DEEP;
      return true;
    }
    if (next_whole < whole) {
      s.tile = next_whole, s.begin = 0, s.end = steps;
      next_whole += workers();
      return true;
    }
    const u32 stop = start(me() + 1);
    if (position == stop) return false;
    s.tile = uniform(position / steps), s.begin = position - s.tile * steps;
    s.end = min(u32(steps), s.begin + stop - position);
    position += s.end - s.begin;
    s.tile += whole;
    return true;
  }
};

// First weight row and token of a tile, of this block's part of it. Tiles go token first, in bands of BAND token tiles.
struct Place {
  int feature, token;
};
template <class K>
DEVICE int across(int n_padded) { // tiles along the features
  constexpr int WIDTH = K::SHAPE.features * K::SHAPE.cluster;
  return (n_padded + WIDTH - 1) / WIDTH;
}
template <class K>
DEVICE Place place(int tile, int m, int n_padded) {
  constexpr Shape S = K::SHAPE;
  constexpr int CLUSTER = S.cluster;
  const int tokens = (m + S.tokens - 1) / S.tokens, features = across<K>(n_padded);
  const int band = uniform(tile / (BAND * features)), width = min(BAND, tokens - band * BAND);
  const int at = tile - band * BAND * features;
  const int feature = uniform(at / width);
  return {(feature * CLUSTER + int(blockIdx.x) % CLUSTER) * S.features, (band * BAND + at - feature * width) * S.tokens};
}

template <class K>
struct Problem {
  typename K::Source source;
  float* scratch;
  u32* counters;
  Output out;
  int k, n_padded, split;
  Factor factor;

  DEVICE Place place(int tile) const { return ::place<K>(tile, out.m, n_padded); }
  DEVICE Schedule<K::SHAPE.cluster, K::SHAPE.deep> schedule() const {
    constexpr int UNIT = STEP * K::STEPS * K::RUN;
    return {(out.m + K::SHAPE.tokens - 1) / K::SHAPE.tokens * across<K>(n_padded), split, (k + UNIT - 1) / UNIT};
  }
};

template <class K>
DEVICE void produce(Shared<K>& shared, const Problem<K>& p, const TensorMap& x) {
  constexpr Shape S = K::SHAPE;
  using Stages = Ring<S.stages>;
  using Weights = Ring<S.weight_stages>;
  auto work = p.schedule();
  constexpr int CLUSTER = S.cluster;
  const int rank = int(blockIdx.x) % CLUSTER;
  u32 done = 0; // stages of weights
  let_next_start();
  for (Segment s; work.next(s);) {
    const Place at = p.place(s.tile);
    const int begin = s.begin * K::RUN, end = s.end * K::RUN; // stages of weights
    typename K::Copies weights(p.source, at, min(S.features, p.n_padded - at.feature), begin, work.steps * K::RUN);
    if (done == 0) {
      // The first stages' weights are on their way to L2 while the kernel before still runs.
      if (elected()) weights.prefetch(begin, min(end, begin + S.weight_stages));
      const TensorMap* map = &x;
      wait_for_previous(map);
    }
    for (int unit = begin; unit < end; unit++, done++) {
      weights.advance(unit);
      if constexpr (K::STEPS > 1) {
        const int stage = Weights::stage(done);
        barrier_wait(shared_address(&shared.weights_empty[stage]), Weights::parity(done) ^ 1);
        if (elected()) {
          const u32 full = shared_address(&shared.weights_full[stage]);
          barrier_expect(full, weights.bytes);
          weights.copy(shared.weights[stage], unit, full);
        }
      }
#pragma unroll
      for (int i = 0; i < K::STEPS; i++) {
        const int stage = Stages::stage(done * K::STEPS + i);
        barrier_wait(shared_address(&shared.empty[stage]), Stages::parity(done * K::STEPS + i) ^ 1);
        if (!elected()) continue;
        const u32 full = shared_address(&shared.full[stage]);
        barrier_expect(full, sizeof(shared.x[0]) + (K::STEPS == 1 ? weights.bytes : 0));
        const u32 to = shared_address(shared.x[stage]);
        const int k = (unit * K::STEPS + i) * STEP;
        if constexpr (CLUSTER == 1)
          copy_box(to, x, k, at.token, full);
        else
          copy_box_to_all<CLUSTER>(to + rank * (sizeof(shared.x[0]) / CLUSTER), x, k,
                                   at.token + rank * (S.tokens / CLUSTER), full);
        if constexpr (K::STEPS == 1) weights.copy(shared.weights[stage], unit, full);
      }
    }
  }
}

DEVICE void add(float* d, float4 v) { d[0] += v.x, d[1] += v.y, d[2] += v.z, d[3] += v.w; }

// Adds the parts of a cut tile. True in the warp that came last, whose `d` then is the whole sum.
template <class K>
DEVICE bool add_parts(Sums<K>& d, const Problem<K>& p, const Schedule<K::SHAPE.cluster, K::SHAPE.deep>& work,
                      const Segment& s, int warp) {
  constexpr int CHUNKS = SUM_REGISTERS<K> / 4, OF_BLOCK = K::SHAPE.tokens / 8; // of 16 bytes a lane
  // Of those in flight at once. Of 128 sums more than four spill, with a factor more than two.
  constexpr int MOST = SPARE<K> > 96 ? 8 : SPARE<K> > 64 ? 4 : 2;
  constexpr int BATCH = CHUNKS == 32 ? (K::FACTOR ? 2 : 4) : MOST > CHUNKS ? 4 : MOST;
  constexpr int CLUSTER = K::SHAPE.cluster, WARPS = CLUSTER * warps_of(K::SHAPE);
  const int lane = fresh_lane();
  const int cut = s.tile - work.whole;
  const int head = work.owner(cut * work.steps), tail = work.owner((cut + 1) * work.steps - 1);
  warp += int(blockIdx.x) % CLUSTER * warps_of(K::SHAPE);
  // A worker has at most two parts: the end of its first tile and the beginning of its last.
  auto part = [&](int worker) {
    const i64 slot = 2 * worker + (worker == head);
    return reinterpret_cast<float4*>(p.scratch) + (slot * WARPS + warp) * CHUNKS * 32 + lane;
  };
  auto chunk = [&](int i) { return &d[i / OF_BLOCK][i % OF_BLOCK * 4]; };

  u32* counter = p.counters + cut * WARPS + warp;
  const u32 others = tail - head;
  bool last = lane == 0 && arrived(counter) == others; // then nobody needs this part in memory
  if (!__any_sync(~0u, last)) {
    float4* mine = part(work.me());
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
      __stcg(mine + i * 32, make_float4(chunk(i)[0], chunk(i)[1], chunk(i)[2], chunk(i)[3]));
    __syncwarp();
    last = lane == 0 && arrive(counter) == others;
    if (!__any_sync(~0u, last)) return false;
  }
  if (lane == 0) *counter = 0;
  __syncwarp();

  const int me = work.me();
#pragma unroll
  for (int i = 0; i < CHUNKS; i += BATCH) {
    float4 sum[BATCH] = {}, v[BATCH];
    auto load = [&](int worker) {
#pragma unroll
      for (int c = 0; c < BATCH; c++) v[c] = load_partial(part(worker) + (i + c) * 32);
    };
    for (int worker = head; worker < me; worker++) {
      load(worker);
#pragma unroll
      for (int c = 0; c < BATCH; c++) sum[c].x += v[c].x, sum[c].y += v[c].y, sum[c].z += v[c].z, sum[c].w += v[c].w;
    }
#pragma unroll
    for (int c = 0; c < BATCH; c++) add(chunk(i + c), sum[c]);
    for (int worker = me + 1; worker <= tail; worker++) {
      load(worker);
#pragma unroll
      for (int c = 0; c < BATCH; c++) add(chunk(i + c), v[c]);
    }
  }
  return true;
}

// A warp's 32 (16) features x tokens, transposed through shared memory into runs of 64 (32) bytes of y.
template <class K, int SUMS>
DEVICE void store(float (&d)[blocks_of(K::SHAPE)][SUMS], const Problem<K>& p,
                  u8 (&buffer)[rows_out(K::SHAPE.tokens)][32 * blocks_of(K::SHAPE)], int token, int feature) {
  constexpr Dtype T = K::T;
  constexpr int TOKENS = 2 * SUMS, PIECES = 2 * blocks_of(K::SHAPE), CHUNK = rows_out(TOKENS);
  const Output& out = p.out;
  const int lane = fresh_lane();
  if (feature >= out.n) return;
  float bias[PIECES];
#pragma unroll
  for (int v = 0; v < PIECES; v++) bias[v] = out.bias_at(min(feature + lane / 4 + 8 * v, out.n - 1));
  // The sums of column feature + lane / 4 + 8 v.
  auto times = [&](int v, float by) {
#pragma unroll
    for (int i = v % 2 * 2; i < TOKENS / 2; i += 4) d[v / 2][i] *= by, d[v / 2][i + 1] *= by;
  };
  K::finish(p, feature, lane, times);
  const bool wide = feature + 8 * PIECES <= out.n && (reinterpret_cast<u64>(out.y) | out.ldy * 2) % 16 == 0;
  // A token's 16-byte piece q, 8 features, lies at q ^ turn(token): neither side meets a bank twice.
  auto turn = [](int row) { return row * PIECES / 8 % PIECES; };
#pragma unroll
  for (int first = 0; first < TOKENS; first += CHUNK) {
    if (token + first >= out.m) return;
    __syncwarp();
    // Four 8 x 8 matrices at once: 32 features of 8 tokens, or 16 of 16.
#pragma unroll
    for (int i = 0; i < CHUNK; i += 32 / PIECES) {
      u32 rows[4];
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int v = q % PIECES, at = first + i + q / PIECES * 8;
        const float* sum = &d[v / 2][at / 2 + v % 2 * 2];
        rows[q] = out.ended2<T>(sum[0], sum[1], bias[v], token + at + lane % 4 * 2, feature + lane / 4 + 8 * v);
      }
      const int q = lane / 8, row = i + q / PIECES * 8 + lane % 8;
      stmatrix4_transposed(shared_address(&buffer[row][(q % PIECES ^ turn(row)) * 16]), rows);
    }
    __syncwarp();
    // What lies outside y repeats a store inside it: a store that only some lanes make would end uniform control flow.
    const int rows = out.m - token - first, columns = out.n - feature;
#pragma unroll
    for (int i = 0; i < CHUNK; i += 32 / PIECES) {
      const int row = min(i + lane / PIECES, rows - 1), piece = lane % PIECES;
      u16* to = out.y + (token + first + row) * out.ldy + feature;
      const u8* from = buffer[row];
      if (wide) {
        reinterpret_cast<uint4*>(to)[piece] = *reinterpret_cast<const uint4*>(from + (piece ^ turn(row)) * 16);
      } else {
#pragma unroll
        for (int c = 0; c < 8; c++) {
          const int column = min(piece * 8 + c, columns - 1);
          to[column] = *reinterpret_cast<const u16*>(from + (column / 8 ^ turn(row)) * 16 + column % 8 * 2);
        }
      }
    }
  }
}

// Adds the parts of a tile that a cluster's blocks have. Each finishes its share of the tokens, of which 16 are a group.
// All threads of the cluster meet twice: when nobody needs stages of x any more, whose place the parts take, and when all
// of them are there.
template <class K>
DEVICE void finish_share(Sums<K>& d, Shared<K>& shared, const Problem<K>& p, int warp, int token, int feature) {
  constexpr Shape S = K::SHAPE;
  constexpr int DEEP = S.deep, GROUPS = S.tokens / 16, MOST = (GROUPS + DEEP - 1) / DEEP; // of a share
  static_assert(blocks_of(S) == 1 && sizeof(shared.x) >= sizeof(float4) * 2 * MOST * DEEP * 32 * warps_of(S));
  const int lane = fresh_lane(), part = part_of_k<DEEP>();
  auto first = [](int part) { return part * GROUPS / DEEP; };
  auto slot = [&](int part, int i) { // i: of 16-byte pieces of a lane, two for each group of a share
    return reinterpret_cast<float4*>(shared.x) + ((part * warps_of(S) + warp) * 2 * MOST + i) * 32 + lane;
  };
  meet_cluster();
#pragma unroll
  for (int to = 0; to < DEEP; to++)
#pragma unroll
    for (int i = 0; i < 2 * MOST; i++) {
      const int from = 4 * (2 * first(to) + i);
      if (from < 8 * first(to + 1))
        store_shared_at(shared_address(slot(part, i)), to,
                        make_float4(d[0][from], d[0][from + 1], d[0][from + 2], d[0][from + 3]));
    }
  meet_cluster();
#pragma unroll
  for (int group = 0; group < MOST; group++) {
    if (first(part) + group == first(part + 1)) return;
    float sum[1][8] = {};
#pragma unroll
    for (int other = 0; other < DEEP; other++)
#pragma unroll
      for (int i = 0; i < 2; i++) add(&sum[0][4 * i], *slot(other, 2 * group + i));
    store<K>(sum, p, shared.out[warp], token + 16 * (first(part) + group), feature);
  }
}

// Named barriers. TURN_OF + group: that group may issue. A wgmma is issued as soon as the queue of the tensor cores has
// room, so two groups that issue together finish together, and then both decode while the tensor cores wait.
constexpr int TURN_OF = 1;

// Way 1 hands its sums to way 0, for the `turn`-th time.
template <class K>
DEVICE void join(Sums<K>& d, Shared<K>& shared, int way, u32 turn) {
  constexpr Shape S = K::SHAPE;
  static_assert(S.ways == 2 && blocks_of(S) == 2);
  const u32 given = shared_address(&shared.given), taken = shared_address(&shared.taken);
  if (way == 1) barrier_wait(taken, turn % 2 ^ 1);
  if (way == 0) barrier_wait(given, turn % 2);
#pragma unroll
  for (int i = 0; i < S.tokens / 4; i++) {
    float* mine = &d[i / (S.tokens / 8)][i % (S.tokens / 8) * 4];
    float4& slot = shared.sums[i][threadIdx.x % S.features];
    if (way == 1)
      slot = make_float4(mine[0], mine[1], mine[2], mine[3]);
    else
      add(mine, slot);
  }
  barrier_arrive(way == 1 ? given : taken);
}

template <class K>
DEVICE void multiply(Shared<K>& shared, const Problem<K>& p, int warp) {
  constexpr Shape S = K::SHAPE;
  constexpr int TOKENS = S.tokens, BLOCKS = blocks_of(S), CLUSTER = S.cluster;
  constexpr int DEPTH = DEPTH_OF<K>, SLICES = STEP / 16 / DEPTH;
  constexpr int LONG = K::RUN * SLICES;     // slices of a run
  constexpr int BODY = LONG < 2 ? 2 : LONG; // slices of a loop body; they alternate between two buffers
  using Stages = Ring<S.stages>;
  using Weights = Ring<S.weight_stages>;
  const int lane = threadIdx.x % 32, way = warp / warps_of(S);
  warp %= warps_of(S);
  typename K::Decoder decode(p.source, warp, lane);
  auto work = p.schedule();
  const int group = warp / 4; // of four warps
  if (turns(S) && group == 1) report(TURN_OF + 0, 256);
  u32 done = 0, joined = 0; // steps; tiles
  for (Segment s; work.next(s);) {
    float total[BLOCKS][TOKENS / 2] = {}, part[BLOCKS][K::SUMS ? TOKENS / 2 : 1];
    auto& d = [&]() -> Sums<K>& {
      if constexpr (K::SUMS)
        return part;
      else
        return total;
    }();
    u32 a[2][DEPTH][BLOCKS][4]; // of a slice and the one after; 16 k, block, register
    const u32 begin = done, first = done + way * K::RUN, last = done + (s.end - s.begin) * K::STEPS * K::RUN;
    done = last;
    decode.begin(p, s, warp);
    auto weights = [&](u32 step) -> const typename K::Stage& { return shared.weights[Weights::stage(step / K::STEPS)]; };
    auto fetch = [&](u32 step, int slice, int buffer) {
      const int g = (DEPTH == 4 ? fresh_lane() : lane) / 4;
      if (slice == 0) {
        decode.scale_ahead(s.begin * K::STEPS * K::RUN + step - begin);
        if (K::STEPS > 1 && step % K::STEPS == 0)
          barrier_wait(shared_address(&shared.weights_full[Weights::stage(step / K::STEPS)]),
                       Weights::parity(step / K::STEPS));
        barrier_wait(shared_address(&shared.full[Stages::stage(step)]), Stages::parity(step));
      }
      decode.template slice<DEPTH>(weights(step), step % K::STEPS, slice, g, a[buffer]);
    };
    auto pin_sums = [&] {
#pragma unroll
      for (int j = 0; j < BLOCKS; j++) pin(d[j]);
    };
    auto issue = [&](u32 step, int slice, int buffer, bool opens) {
      const u64 b = swizzled_tile(shared_address(shared.x[Stages::stage(step)])) + slice * DEPTH * 2;
      if (turns(S) && slice == 0) meet(TURN_OF + group, 256);
      pin_sums();
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < DEPTH; i++)
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
          if (K::SUMS && opens && i == 0)
            wgmma<K::T, TOKENS, false>(d[j], a[buffer][i][j], b + i * 2);
          else
            wgmma<K::T, TOKENS>(d[j], a[buffer][i][j], b + i * 2);
        }
      wgmma_commit();
      if (turns(S) && slice == SLICES - 1) report(TURN_OF + 1 - group, 256);
      pin_sums();
    };
    auto scale_sums = [&](u32 step) {
      if constexpr (K::SUMS) {
        float by[2 * BLOCKS];
        decode.sum_scales(weights(step), lane / 4, by);
#pragma unroll
        for (int j = 0; j < BLOCKS; j++)
#pragma unroll
          for (int i = 0; i < TOKENS / 2; i++) total[j][i] = fmaf(by[2 * j + i % 4 / 2], d[j][i], total[j][i]);
      }
    };

    if (first < last) fetch(first, 0, 0);
    decode.scale_now();
    for (u32 body = first; body < last; body += BODY / SLICES * S.ways) {
      auto step_of = [&](int i) -> u32 { return body + i / LONG * (K::RUN * S.ways) + i / SLICES % K::RUN; };
#pragma unroll
      for (int i = 0; i < BODY; i++) {
        const u32 step = step_of(i), next = step_of(i + 1);
        const bool ends = i % LONG == LONG - 1; // a run
        if (i < LONG || step < last) {
          issue(step, i % SLICES, i % 2, i % LONG == 0);
          if (!ends || next < last) fetch(next, (i + 1) % SLICES, (i + 1) % 2);
          wgmma_wait<0>();
          pin_sums();
          if (ends) scale_sums(step);
          if (i % SLICES == SLICES - 1) {
            const u32 empty = shared_address(&shared.empty[Stages::stage(step)]);
            if constexpr (CLUSTER == 1) {
              if (lane == 0) barrier_arrive(empty);
            } else {
              if (lane < CLUSTER) barrier_arrive_at(empty, lane);
            }
            if (K::STEPS > 1 && step % K::STEPS == K::STEPS - 1 && lane == 0)
              barrier_arrive(shared_address(&shared.weights_empty[Weights::stage(step / K::STEPS)]));
          }
        }
      }
    }

    if constexpr (S.ways > 1) {
      join<K>(total, shared, way, joined++);
      if (way > 0) continue;
    }
    if constexpr (S.deep == 1) {
      if (s.end - s.begin < work.steps && !add_parts<K>(total, p, work, s, warp)) continue;
    }
    const Place at = p.place(s.tile);
    const int feature = at.feature + warp * 16 * BLOCKS;
    if constexpr (S.deep > 1)
      finish_share<K>(total, shared, p, warp, at.token, feature);
    else
      store<K>(total, p, shared.out[warp], at.token, feature);
  }
}

// What a kernel does, whatever W is.
template <class K>
DEVICE void run(const Problem<K>& p, const TensorMap& x) {
  constexpr Shape S = K::SHAPE;
  extern __shared__ __align__(1024) u8 dynamic[];
  Shared<K>& shared = *reinterpret_cast<Shared<K>*>(dynamic);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S.stages; i++) {
      barrier_init(shared_address(&shared.full[i]), 1);
      barrier_init(shared_address(&shared.empty[i]), warps_of(S) * S.cluster);
    }
    for (int i = 0; K::STEPS > 1 && i < S.weight_stages; i++) {
      barrier_init(shared_address(&shared.weights_full[i]), 1);
      barrier_init(shared_address(&shared.weights_empty[i]), warps_of(S));
    }
    barrier_init(shared_address(&shared.given), S.features);
    barrier_init(shared_address(&shared.taken), S.features);
    barrier_init_done();
    prefetch(x);
  }
  __syncthreads();
  if constexpr (S.cluster > 1 || S.deep > 1) meet_cluster(); // barriers are there; with `deep` it was measured so

  const int warp = uniform(threadIdx.x / 32);
  if (warp < warps_of(S) * S.ways) {
    registers_take<consumer_registers(S)>();
    multiply<K>(shared, p, warp);
  } else {
    registers_release<producer_registers(S)>();
    if (warp == warps_of(S) * S.ways) produce<K>(shared, p, x);
    if constexpr (S.deep > 1) meet_cluster(), meet_cluster(); // as in finish_share
  }
  if constexpr (S.cluster > 1) meet_cluster(); // nobody copies to this block or arrives here any more
}
