// y[m, n] = x[m, k] W^T for m > 8 on Hopper: marlin tiles decoded straight into the A registers of wgmma.
//
//   a warpgroup multiplies 128 rows of W with the tokens of a tile; each of its warps takes 32 rows, half a 64-wide tile
//   one more warp fills a ring of stages, 64 k each: x as a swizzled box; weights, scales and zeros as they lie
//
//   A warp decodes one slice of a stage while the slice before is multiplied:
//
//       issue slice 0 | decode slice 1 | wait for slice 0 | issue slice 1 | decode slice 2 | ...
//
//   The grid is persistent. Whole tiles go round the blocks; the last `split` tiles are cut along k into one even share
//   for each block, wherever that falls. The last warp to finish its part of a cut tile adds the parts in order of k, so
//   results do not depend on who was last.
#include "decode.cuh"
#include "hopper.cuh"
#include "output.cuh"

struct Variant {
  int element, x, scale; // Element, Dtype, Dtype
  int zero;              // 1: zero points from qzeros
  int rows;              // rows of scales in 64 k: 1, 2, 4; 0: one scale for all of k
  int block;             // 1: a scale for whole tiles of columns, or, when rows is 0, no scale but the factor
  int factor;            // 1: sums over all of k have a factor of their own (decode.cuh)
  int features, tokens;  // of a tile: 128 .. 512, 16 .. 128
  int ways;              // 2: a second set of warpgroups has the same features, and each takes every other 64 k
  int stages;            // a power of two
};

constexpr int STEP = 64; // k of a stage
// Scales multiply the 16-bit weights where that rounds once (integers) or never; else fp32 sums, of 64 k or all.
constexpr bool is_float(Variant v) { return facts(Element(v.element)).exponent != 0; }
constexpr bool scales_exactly(Variant v) {
  return v.rows != 0 && exact_product(Element(v.element), Dtype(v.x), Dtype(v.scale));
}
constexpr bool scales_sums(Variant v) { return v.rows != 0 && is_float(v) && !scales_exactly(v); }

constexpr int BAND = 8;  // token tiles that go through all features together, so that x of these stays in L2
// Two warpgroups of long wgmmas take turns: see TURN_OF.
constexpr bool turns(Variant v) { return v.tokens == 128 && v.features == 256 && v.ways == 1; }
constexpr int warps_of(Variant v) { return v.features / 32; } // of one way
constexpr int rows_out(Variant v) { return v.tokens < 32 ? v.tokens : 32; } // tokens of y that go out together
constexpr int threads_of(Variant v) { return v.features * v.ways + 128; }
// Registers of a thread after the roles have shared them out: setmaxnreg counts in eights and takes no less than 24.
constexpr int all_registers(Variant v) { return 65536 / threads_of(v) / 8 * 8 * threads_of(v); }
constexpr int consumer_registers(Variant v) { return (all_registers(v) - 24 * 128) / (threads_of(v) - 128) / 8 * 8; }
constexpr int producer_registers(Variant v) {
  return (all_registers(v) - consumer_registers(v) * (threads_of(v) - 128)) / 128 / 8 * 8;
}
// Beside the sums and what decoding an element takes more than u4b8 with scales of x's own type.
constexpr int spare_registers(Variant v) {
  const int decoding = (v.zero ? 12 : 0) + (facts(Element(v.element)).bits == 8 ? 8 : 0) + (v.scale != v.x && !scales_sums(v) ? 8 : 0);
  return consumer_registers(v) - v.tokens * (scales_sums(v) ? 2 : 1) - decoding;
}

template <Variant V>
struct alignas(1024) Shared {
  static constexpr int BITS = facts(Element(V.element)).bits;
  static constexpr int SLICE = V.features * 2 * BITS; // bytes of 16 k
  static constexpr int ROW_BYTES = V.block || V.rows == 0 ? 0 : bytes_of(Dtype(V.scale)); // of a column; 0: none in stages
  static constexpr int SCALES = V.features * ROW_BYTES, ZEROS = V.zero ? V.features * BITS / 8 : 0;
  static constexpr int ROWS = V.rows * (SCALES + ZEROS);

  u8 x[V.stages][V.tokens * STEP * 2];
  u8 weights[V.stages][STEP / 16][SLICE];
  u8 scales[V.stages][ROWS ? ROWS : 16]; // rows of scales, then rows of zeros
  u8 out[warps_of(V)][rows_out(V)][64];
  float4 sums[V.ways > 1 ? V.tokens / 4 : 1][V.ways > 1 ? V.features : 1]; // of the other way, a thread's side by side
  u64 full[V.stages], empty[V.stages];
};

// The steps of a block, counted from its first, go round the stages.
template <Variant V>
struct Ring {
  static_assert((V.stages & V.stages - 1) == 0);
  static DEVICE int stage(u32 step) { return step % V.stages; }
  static DEVICE u32 parity(u32 step) { return step / V.stages % 2; }
};

// Steps [begin, end) of a tile.
struct Segment {
  int tile, begin, end;
};

// This block's segments, in the order in which every role goes through them: whole tiles first, so that all blocks read
// the same k at the same time, then its share of the last `split` tiles, which are cut evenly.
struct Schedule {
  int whole, split, steps; // whole: tiles that are not cut; steps: of a tile
  int next_whole;
  u32 position; // next unit (64 k of a tile) of the cut tiles

  DEVICE Schedule(int tiles, int split, int k) : whole(tiles - split), split(split), steps((k + STEP - 1) / STEP) {
    next_whole = blockIdx.x, position = start(blockIdx.x);
  }
  // First unit of block b's share; split * steps * blocks < 2^32. The same in all lanes, which the division hides.
  DEVICE u32 start(u32 b) const { return uniform(u32(split * steps) * b / gridDim.x); }
  // The block whose share holds a unit.
  DEVICE int owner(u32 unit) const { return uniform(((unit + 1) * gridDim.x - 1) / u32(split * steps)); }

  DEVICE bool next(Segment& s) {
    if (next_whole < whole) {
      s.tile = next_whole, s.begin = 0, s.end = steps;
      next_whole += gridDim.x;
      return true;
    }
    const u32 stop = start(blockIdx.x + 1);
    if (position == stop) return false;
    s.tile = uniform(position / steps), s.begin = position - s.tile * steps;
    s.end = min(u32(steps), s.begin + stop - position);
    position += s.end - s.begin;
    s.tile += whole;
    return true;
  }
};

// First weight row and token of a tile. Tiles go token first, in bands of BAND token tiles.
struct Place {
  int feature, token;
};
template <Variant V>
DEVICE Place place(int tile, int m, int n_padded) {
  const int tokens = (m + V.tokens - 1) / V.tokens, features = (n_padded + V.features - 1) / V.features;
  const int band = uniform(tile / (BAND * features)), width = min(BAND, tokens - band * BAND);
  const int at = tile - band * BAND * features;
  const int feature = uniform(at / width);
  return {feature * V.features, (band * BAND + at - feature * width) * V.tokens};
}

template <Variant V>
struct Problem {
  const u8 *weights, *scales, *zeros;
  float* scratch;
  u32* counters;
  Output out;
  int k, n_padded, group, split;
  Factor factor;
  int scales_in_row; // of a grid of block scales

  DEVICE Schedule schedule() const {
    return {(out.m + V.tokens - 1) / V.tokens * ((n_padded + V.features - 1) / V.features), split, k};
  }
};

template <Variant V>
DEVICE void produce(Shared<V>& shared, const Problem<V>& p, const TensorMap& x) {
  using S = Shared<V>;
  Schedule work = p.schedule();
  u32 done = 0; // steps
  let_next_start();
  for (Segment s; work.next(s);) {
    const Place at = place<V>(s.tile, p.out.m, p.n_padded);
    const int features = min(V.features, p.n_padded - at.feature);
    const u32 slice_bytes = features * 2 * S::BITS, scale = features * S::ROW_BYTES, zero = features * S::BITS / 8;
    const u32 bytes = sizeof(shared.x[0]) + STEP / 16 * slice_bytes + V.rows * (scale + (V.zero ? zero : 0));
    const u64 pitch = u64(p.n_padded) * 2 * S::BITS;
    const u8* weights = p.weights + at.feature * 2 * S::BITS;
    const int run = p.group < STEP ? work.steps : p.group / STEP; // steps that share a row of scales
    if (done == 0) {
      // The first stages' weights are on their way to L2 while the kernel before still runs.
      if (elected())
        for (int slice = s.begin * (STEP / 16); slice < min(s.end, s.begin + V.stages) * (STEP / 16); slice++)
          prefetch_bulk(weights + slice * pitch, slice_bytes);
      const TensorMap* map = &x;
      wait_for_previous(map);
    }
    int row = uniform(s.begin / run), left = run - (s.begin - row * run);
    for (int step = s.begin; step < s.end; step++, done++) {
      const int stage = Ring<V>::stage(done), first = V.rows == 1 ? row : step * V.rows;
      if (--left == 0) row++, left = run;
      barrier_wait(shared_address(&shared.empty[stage]), Ring<V>::parity(done) ^ 1);
      if (!elected()) continue;
      const u32 full = shared_address(&shared.full[stage]);
      barrier_expect(full, bytes);
      copy_box(shared_address(shared.x[stage]), x, step * STEP, at.token, full);
#pragma unroll
      for (int i = 0; i < STEP / 16; i++)
        copy_bulk(shared_address(shared.weights[stage][i]), weights + (step * (STEP / 16) + i) * pitch, slice_bytes, full);
      const u32 to = shared_address(shared.scales[stage]);
#pragma unroll
      for (int r = 0; r < V.rows; r++) {
        const u64 from = u64(first + r) * p.n_padded + at.feature;
        if (S::ROW_BYTES) copy_bulk(to + r * S::SCALES, p.scales + from * S::ROW_BYTES, scale, full);
        if (V.zero) copy_bulk(to + V.rows * S::SCALES + r * S::ZEROS, p.zeros + from * S::BITS / 8, zero, full);
      }
    }
  }
}

// Decodes a warp's 32 rows: half a 64-wide tile, blocks 2 half and 2 half + 1.
template <Variant V>
struct Decoder {
  static constexpr Dtype T = Dtype(V.x), S = Dtype(V.scale);
  using D = Decode<Element(V.element), T, V.zero != 0>;
  using Bytes = Shared<V>;
  int tile, half, lane; // tile: of the block's 64-wide ones

  DEVICE Decoder(int warp, int lane) : tile(warp / 2), half(warp % 2), lane(lane) {}

  // 16 k of a stage -> the A fragments of two blocks, scaled: (q - zero) * scale rounded once.
  DEVICE void operator()(const Shared<V>& shared, int stage, int slice, int g, u32 (&a)[2][4]) const {
    u32 words[2][D::WORDS];
    const u8* from = shared.weights[stage][slice] + tile * 128 * Bytes::BITS + (lane * 2 + half) * 2 * Bytes::BITS;
    if constexpr (D::WORDS == 1) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      words[0][0] = v.x, words[1][0] = v.y;
    } else {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      words[0][0] = v.x, words[0][1] = v.y, words[1][0] = v.z, words[1][1] = v.w;
    }
    const int row = slice * V.rows / 4, column = tile * 64 + g * 8; // the lane's eight columns, side by side
    Zero low[2], high[2];
    zeros(shared.scales[stage] + V.rows * Bytes::SCALES + row * Bytes::ZEROS + column * Bytes::BITS / 8, low, high);
    const u8* scales = shared.scales[stage] + row * Bytes::SCALES + (column + half * 4) * bytes_of(S);
    if constexpr (scales_exactly(V)) {
      u32 s[2][2];
      Scaled<Element(V.element), T, S>::rows(reinterpret_cast<const u32*>(scales), s);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        D::raw(words[j], a[j]);
        Scaled<Element(V.element), T, S>::block(a[j], s[j][0], s[j][1]);
      }
    } else if constexpr (is_float(V)) {
#pragma unroll
      for (int j = 0; j < 2; j++) D::block(words[j], low[j], high[j], a[j]);
    } else if constexpr (S == T) {
      const uint2 v = *reinterpret_cast<const uint2*>(scales);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        D::block(words[j], low[j], high[j], a[j]);
        const u32 pair = j ? v.y : v.x, s[2] = {twice(pair, 0), twice(pair, 1)};
#pragma unroll
        for (int i = 0; i < 4; i++) a[j][i] = mul2<T>(a[j][i], s[i % 2]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        D::block(words[j], low[j], high[j], a[j]);
        const float s[2] = {scale_at(scales, 2 * j), scale_at(scales, 2 * j + 1)};
#pragma unroll
        for (int i = 0; i < 4; i++)
          a[j][i] = pack<T>(to_float<T>(u16(a[j][i])) * s[i % 2], to_float<T>(u16(a[j][i] >> 16)) * s[i % 2]);
      }
    }
  }

  // Of the sums of a stage's 64 k: scale v belongs to row g + 8 v of the warp's 32.
  DEVICE void sum_scales(const Shared<V>& shared, int stage, int g, float (&s)[4]) const {
    const u8* from = shared.scales[stage] + (tile * 64 + g * 8 + half * 4) * bytes_of(S);
#pragma unroll
    for (int v = 0; v < 4; v++) s[v] = scale_at(from, v);
  }

  static DEVICE float scale_at(const u8* scales, int i) {
    if constexpr (S == Dtype::f32)
      return reinterpret_cast<const float*>(scales)[i];
    else if constexpr (bytes_of(S) == 1)
      return number<S>(scales[i], 0);
    else
      return to_float<S>(reinterpret_cast<const u16*>(scales)[i]);
  }

  DEVICE void zeros(const u8* from, Zero (&low)[2], Zero (&high)[2]) const {
#pragma unroll
    for (int j = 0; j < 2; j++) low[j] = high[j] = D::fixed();
    if constexpr (V.zero) {
      const u32* word = reinterpret_cast<const u32*>(from);
      const u32 words[D::WORDS] = {Bytes::BITS == 4 ? word[0] >> 8 * half : word[half]}; // blocks 0 and 1 are its first
#pragma unroll
      for (int j = 0; j < 2; j++) D::zeros(words, j, low[j], high[j]);
    }
  }
};

DEVICE void add(float* d, float4 v) { d[0] += v.x, d[1] += v.y, d[2] += v.z, d[3] += v.w; }

// Adds the parts of a cut tile. True in the warp that came last, whose `d` then is the whole sum.
template <Variant V>
DEVICE bool add_parts(float (&d)[2][V.tokens / 2], const Problem<V>& p, const Schedule& work, const Segment& s,
                      int warp) {
  constexpr int CHUNKS = V.tokens / 4; // of 16 bytes a lane
  // Of those in flight at once. At 128 tokens more than four spill, with a factor more than two.
  constexpr int MOST = spare_registers(V) > 96 ? 8 : spare_registers(V) > 64 ? 4 : 2;
  constexpr int BATCH = V.tokens == 128 ? (V.factor ? 2 : 4) : MOST > CHUNKS ? 4 : MOST;
  const int lane = fresh_lane();
  const int cut = s.tile - work.whole;
  const int head = work.owner(cut * work.steps), tail = work.owner((cut + 1) * work.steps - 1);
  // A block has at most two parts: the end of its first tile and the beginning of its last.
  auto part = [&](int block) {
    const i64 slot = 2 * block + (block == head);
    return reinterpret_cast<float4*>(p.scratch) + (slot * warps_of(V) + warp) * CHUNKS * 32 + lane;
  };
  auto chunk = [&](int i) { return &d[i / (CHUNKS / 2)][i % (CHUNKS / 2) * 4]; };

  u32* counter = p.counters + cut * warps_of(V) + warp;
  const u32 others = tail - head;
  bool last = lane == 0 && arrived(counter) == others; // then nobody needs this part in memory
  if (!__any_sync(~0u, last)) {
    float4* mine = part(blockIdx.x);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
      __stcg(mine + i * 32, make_float4(chunk(i)[0], chunk(i)[1], chunk(i)[2], chunk(i)[3]));
    __syncwarp();
    last = lane == 0 && arrive(counter) == others;
    if (!__any_sync(~0u, last)) return false;
  }
  if (lane == 0) *counter = 0;
  __syncwarp();

  const int me = blockIdx.x;
#pragma unroll
  for (int i = 0; i < CHUNKS; i += BATCH) {
    float4 sum[BATCH] = {}, v[BATCH];
    auto load = [&](int block) {
#pragma unroll
      for (int c = 0; c < BATCH; c++) v[c] = load_partial(part(block) + (i + c) * 32);
    };
    for (int block = head; block < me; block++) {
      load(block);
#pragma unroll
      for (int c = 0; c < BATCH; c++) sum[c].x += v[c].x, sum[c].y += v[c].y, sum[c].z += v[c].z, sum[c].w += v[c].w;
    }
#pragma unroll
    for (int c = 0; c < BATCH; c++) add(chunk(i + c), sum[c]);
    for (int block = me + 1; block <= tail; block++) {
      load(block);
#pragma unroll
      for (int c = 0; c < BATCH; c++) add(chunk(i + c), v[c]);
    }
  }
  return true;
}

// A warp's 32 features x V.tokens, transposed through shared memory into runs of 64 bytes of y.
template <Variant V>
DEVICE void store(float (&d)[2][V.tokens / 2], const Problem<V>& p, u8 (&buffer)[rows_out(V)][64], int token, int feature) {
  constexpr Dtype T = Dtype(V.x), S = Dtype(V.scale), F = V.rows == 0 && V.block ? S : Dtype::f32;
  const Output& out = p.out;
  constexpr int CHUNK = rows_out(V);
  const int lane = fresh_lane();
  if (feature >= out.n) return;
  float bias[4];
#pragma unroll
  for (int v = 0; v < 4; v++) bias[v] = out.bias_at(min(feature + lane / 4 + 8 * v, out.n - 1));
  // Scales of all of k, then factors: pieces v and v + 4 of a row of d[0], d[1] are columns lane / 4 + 8 v, 16 + 8 v.
  auto times = [&](int v, float by) {
#pragma unroll
    for (int i = v % 2 * 2; i < V.tokens / 2; i += 4) d[v / 2][i] *= by, d[v / 2][i + 1] *= by;
  };
#pragma unroll
  for (int v = 0; v < 4; v++) {
    if constexpr (V.rows == 0 && !V.block) {
      const int at = feature / 64 * 64 + lane / 4 * 8 + feature % 64 / 8 + v;
      times(v, number<S>(load_one<S>(p.scales + at * bytes_of(S)), 0));
    }
    float by = 1;
    if constexpr (scales_exactly(V)) by = Scaled<Element(V.element), T, S>::UP; // times a factor: still one rounding
    if constexpr (V.factor) by *= p.factor.template of<F>(feature + lane / 4 + 8 * v);
    if constexpr (scales_exactly(V) || V.factor) times(v, by);
  }
  const bool wide = feature + 32 <= out.n && (reinterpret_cast<u64>(out.y) | out.ldy * 2) % 16 == 0;
#pragma unroll
  for (int first = 0; first < V.tokens; first += CHUNK) {
    if (token + first >= out.m) return;
    __syncwarp();
    // 16-byte piece q of a token's 64 bytes lies at q ^ (token / 2) % 4: neither side meets a bank twice.
#pragma unroll
    for (int i = 0; i < CHUNK / 8; i++) {
      const float *d0 = &d[0][(first / 8 + i) * 4], *d1 = &d[1][(first / 8 + i) * 4];
      const int at = token + first + i * 8 + lane % 4 * 2, row = feature + lane / 4;
      const u32 rows[4] = {
          out.ended2<T>(d0[0], d0[1], bias[0], at, row), out.ended2<T>(d0[2], d0[3], bias[1], at, row + 8),
          out.ended2<T>(d1[0], d1[1], bias[2], at, row + 16), out.ended2<T>(d1[2], d1[3], bias[3], at, row + 24)};
      stmatrix4_transposed(shared_address(&buffer[i * 8 + lane % 8][(lane / 8 ^ lane % 8 / 2) * 16]), rows);
    }
    __syncwarp();
    // What lies outside y repeats a store inside it: a store that only some lanes make would end uniform control flow.
    const int rows = out.m - token - first, columns = out.n - feature;
#pragma unroll
    for (int i = 0; i < CHUNK / 8; i++) {
      const int row = min(i * 8 + lane / 4, rows - 1), piece = lane % 4;
      u16* to = out.y + (token + first + row) * out.ldy + feature;
      const u8* from = buffer[row];
      if (wide) {
        reinterpret_cast<uint4*>(to)[piece] = *reinterpret_cast<const uint4*>(from + (piece ^ row / 2 % 4) * 16);
      } else {
#pragma unroll
        for (int c = 0; c < 8; c++) {
          const int column = min(piece * 8 + c, columns - 1);
          to[column] = *reinterpret_cast<const u16*>(from + (column / 8 ^ row / 2 % 4) * 16 + column % 8 * 2);
        }
      }
    }
  }
}

// Named barriers. TURN_OF + group: that group may issue. A wgmma is issued as soon as the queue of the tensor cores has
// room, so two groups that issue together finish together, and then both decode while the tensor cores wait.
constexpr int FREE = 1, FULL = 2, TURN_OF = 3;

// Way 1 hands its sums to way 0.
template <Variant V>
DEVICE void join(float (&d)[2][V.tokens / 2], Shared<V>& shared, int way) {
  constexpr int ALL = V.features * V.ways;
  static_assert(V.ways == 2);
  const int thread = threadIdx.x % V.features;
  if (way == 1) meet(FREE, ALL);
  if (way == 0) meet(FULL, ALL);
#pragma unroll
  for (int i = 0; i < V.tokens / 4; i++) {
    float* mine = &d[i / (V.tokens / 8)][i % (V.tokens / 8) * 4];
    float4& slot = shared.sums[i][thread];
    if (way == 1)
      slot = make_float4(mine[0], mine[1], mine[2], mine[3]);
    else
      add(mine, slot);
  }
  if (way == 1) report(FULL, ALL);
  if (way == 0) report(FREE, ALL);
}

// The warp's first scale in a grid of blocks of whole 64-wide tiles.
template <Variant V>
DEVICE const u8* block_scales(const Problem<V>& p, const Segment& s, int warp) {
  const int feature = min(place<V>(s.tile, p.out.m, p.n_padded).feature + warp * 32, p.n_padded - 1);
  return p.scales + uniform(feature / p.factor.columns) * bytes_of(Dtype(V.scale));
}

template <Variant V>
DEVICE void multiply(Shared<V>& shared, const Problem<V>& p, int warp) {
  constexpr Dtype T = Dtype(V.x), S = Dtype(V.scale);
  constexpr bool SUMS = scales_sums(V);
  // 16 k's of a slice: what is decoded while the slice before is multiplied. As many as registers allow.
  constexpr int DEPTH = spare_registers(V) > 96 ? 4 : spare_registers(V) > 68 ? 2 : 1, SLICES = STEP / 16 / DEPTH;
  constexpr int BODY = SLICES < 2 ? 2 : SLICES; // slices of a loop body; they alternate between two buffers
  const int lane = threadIdx.x % 32, way = warp / warps_of(V);
  warp %= warps_of(V);
  const Decoder<V> decode(warp, lane);
  Schedule work = p.schedule();
  if (V.ways > 1 && way == 0) report(FREE, V.features * V.ways);
  const int group = warp / 4; // of four warps
  if (turns(V) && group == 1) report(TURN_OF + 0, 256);
  const Divide run_of(SUMS && V.block ? p.group / STEP : 1); // steps that share a row of the grid of block scales
  u32 done = 0; // steps
  for (Segment s; work.next(s);) {
    float total[2][V.tokens / 2] = {}, part[2][SUMS ? V.tokens / 2 : 1];
    auto& d = [&]() -> float(&)[2][V.tokens / 2] {
      if constexpr (SUMS) return part;
      else return total;
    }();
    u32 a[2][DEPTH][2][4]; // of a slice and the one after; 16 k, block, register
    const u32 begin = done, first = done + way, last = done + s.end - s.begin;
    done = last;
    float scale = 0, next_scale = 0; // of a block; the next is on its way while the current step is multiplied
    const u8* block = SUMS && V.block ? block_scales(p, s, warp) : nullptr;
    auto fetch = [&](u32 step, int slice, int buffer) {
      const int stage = Ring<V>::stage(step), g = (DEPTH == 4 ? fresh_lane() : lane) / 4;
      if (SUMS && V.block && slice == 0)
        next_scale = number<S>(load_one<S>(block + i64(run_of(s.begin + step - begin)) * p.scales_in_row * bytes_of(S)), 0);
      if (slice == 0) barrier_wait(shared_address(&shared.full[stage]), Ring<V>::parity(step));
#pragma unroll
      for (int i = 0; i < DEPTH; i++) decode(shared, stage, slice * DEPTH + i, g, a[buffer][i]);
    };
    auto issue = [&](u32 step, int slice, int buffer) {
      const u32 b = shared_address(shared.x[Ring<V>::stage(step)]) + slice * DEPTH * 32;
      if (turns(V) && slice == 0) meet(TURN_OF + group, 256);
      pin(d[0]), pin(d[1]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < DEPTH; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          if (SUMS && slice == 0 && i == 0)
            wgmma<T, V.tokens, false>(d[j], a[buffer][i][j], swizzled_tile(b + i * 32));
          else
            wgmma<T, V.tokens>(d[j], a[buffer][i][j], swizzled_tile(b + i * 32));
        }
      wgmma_commit();
      if (turns(V) && slice == SLICES - 1) report(TURN_OF + 1 - group, 256);
      pin(d[0]), pin(d[1]);
    };

    auto scale_step = [&](u32 step) {
      float by[4] = {scale, scale, scale, scale};
      if constexpr (!V.block) decode.sum_scales(shared, Ring<V>::stage(step), lane / 4, by);
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int i = 0; i < V.tokens / 2; i++) total[j][i] = fmaf(by[2 * j + i % 4 / 2], d[j][i], total[j][i]);
      scale = next_scale;
    };

    if (first < last) fetch(first, 0, 0);
    scale = next_scale;
    for (u32 body = first; body < last; body += BODY / SLICES * V.ways) {
#pragma unroll
      for (int i = 0; i < BODY; i++) {
        const u32 step = body + i / SLICES * V.ways, next = i % SLICES == SLICES - 1 ? step + V.ways : step;
        if (step < last) {
          issue(step, i % SLICES, i % 2);
          if (next < last) fetch(next, (i + 1) % SLICES, (i + 1) % 2);
          wgmma_wait<0>();
          pin(d[0]), pin(d[1]);
          if constexpr (SUMS) {
            if (next != step) scale_step(step);
          }
          if (next != step && lane == 0) barrier_arrive(shared_address(&shared.empty[Ring<V>::stage(step)]));
        }
      }
    }

    if constexpr (V.ways > 1) {
      join<V>(total, shared, way);
      if (way > 0) continue;
    }
    if (s.end - s.begin < work.steps && !add_parts<V>(total, p, work, s, warp)) continue;
    const Place at = place<V>(s.tile, p.out.m, p.n_padded);
    store<V>(total, p, shared.out[warp], at.token, at.feature + warp * 32);
  }
}

template <Variant V>
__global__ void __launch_bounds__(threads_of(V), 1)
    marlin_wgmma(const u8* __restrict__ qweight, const u8* __restrict__ scales, const u8* __restrict__ qzeros,
                 const void* __restrict__ factors, const void* __restrict__ bias,
                 const __grid_constant__ TensorMap x_map, u16* y, const void* residual, float* scratch, u32* counters,
                 int m, int n, int k, int n_padded, int group, i64 ldy, i64 ld_residual, int each, int bias_type,
                 int columns, int part1, int part2, int part3, int split) {
  extern __shared__ __align__(1024) u8 dynamic[];
  Shared<V>& shared = *reinterpret_cast<Shared<V>*>(dynamic);
  if (threadIdx.x == 0) {
    for (int i = 0; i < V.stages; i++) {
      barrier_init(shared_address(&shared.full[i]), 1);
      barrier_init(shared_address(&shared.empty[i]), warps_of(V));
    }
    barrier_init_done();
    prefetch(x_map);
  }
  __syncthreads();

  const Output out{y, ldy, m, n, bias, Dtype(bias_type), residual, ld_residual, each};
  const Problem<V> p{qweight, scales, qzeros, scratch, counters, out, k, n_padded, group, split,
                     {factors, n, columns, {part1, part2, part3}}, (n + columns - 1) / columns};
  const int warp = uniform(threadIdx.x / 32);
  if (warp < warps_of(V) * V.ways) {
    if constexpr (threads_of(V) > 256) registers_take<consumer_registers(V)>();
    multiply<V>(shared, p, warp);
  } else {
    if constexpr (threads_of(V) > 256) registers_release<producer_registers(V)>();
    if (warp == warps_of(V) * V.ways) produce<V>(shared, p, x_map);
  }
}
