// y[m, n] = x[m, k] W^T for m > 8. Eight warps share a block of 64 * wn features x 8 * blocks * wm tokens:
//
//   wn along features, wm along tokens, wk = 8 / (wn * wm) along k; a warp's tile is 64 features x 8 * blocks tokens
//
// W goes from global memory into registers, one step of 64 k ahead: nobody else in the block wants it (wm = 1), or L1
// has it (wm = 2). x goes through a ring of shared memory: rows of 64 k, 16-byte chunk c of row r at chunk c ^ (r % 8).
//
// Blocks stay: whole output tiles first, dealt out in turn; the tiles that would leave a ragged last wave are cut along
// k into equal shares (`streams` of them), whose partial sums the last block of a tile adds in order of k.
#include "decode.cuh"
#include "output.cuh"

struct Variant {
  int element, x, scale; // Element, Dtype, Dtype; x in f32 comes as pairs of f16 rows (pairs.cu)
  int zero;              // 1: zero points from qzeros
  int run;               // slices that share a scale: 1, 2, 4; 0: one scale for all of k
  int block;             // 1: a scale for whole tiles of columns, or, when run is 0, no scale but the factor
  int factor;            // 1: sums over all of k have a factor of their own (decode.cuh)
  int blocks, columns;   // of a warp: blocks of 8 tokens, blocks j of 16 features (4, or 2: half a tile)
  int wn, wm;            // warps along features, along tokens
  int whole;             // 1: rows of x are whole numbers as f16, with a factor each (quantize_rows.cu)
};

constexpr int THREADS = 256;
constexpr int SLICES = 4; // k16 slices of a warp's step

// Scales that would not multiply 16-bit weights with one rounding at most, or beyond their range, multiply fp32 sums of
// a run; and all do where x is whole numbers, whose sums are exact.
constexpr bool scales_exactly(Variant v) {
  return v.run != 0 && exact_product(Element(v.element), Dtype(v.x), Dtype(v.scale));
}
constexpr bool scales_sums(Variant v) {
  const bool rounds_once = v.scale == v.x && Dtype(v.x) != Dtype::f32 && !facts(Element(v.element)).exponent;
  return v.run != 0 && !scales_exactly(v) && (v.whole || !rounds_once);
}

template <Variant V>
struct Shape {
  static constexpr int WN = V.wn, WM = V.wm, WK = 8 / (WN * WM), NB = V.blocks, JB = V.columns;
  static constexpr int FEATURES = 16 * JB * WN, TOKENS = 8 * NB * WM, STEP = 64 * WK;
  static constexpr int STAGE = TOKENS * STEP * 2; // bytes of x
  static constexpr int STAGES = STAGE > 16384 ? 3 : 4;
  // Blocks on one SM, where 128 registers do; plan() knows it too.
  static constexpr bool LEAN = facts(Element(V.element)).bits == 4 && V.run != 1 && !scales_sums(V);
  static constexpr int RESIDENT = NB * JB <= 8 && LEAN ? 2 : 1;
  static constexpr int FLOATS = FEATURES * TOKENS;
  static constexpr int ROW = FEATURES + 8; // u16 of a token's row on the way out, padded to spread the banks
  static_assert((WK - 1) * FLOATS * 4 <= STAGE * STAGES);
};

// k steps [first, last) of output tile `id`; id < 0: nothing left.
struct Segment {
  int id, first, last;
};

template <Variant V>
__global__ void __launch_bounds__(THREADS, Shape<V>::RESIDENT)
    marlin_tiled(const u32* __restrict__ qweight, const u8* __restrict__ scales, const u32* __restrict__ qzeros,
                 const void* __restrict__ factors, const void* __restrict__ bias, const u16* x, u16* y,
                 const void* residual, const float* row_factors, float* scratch, u32* counters, int m, int n, int k,
                 int n_padded, int k_padded, int group, i64 ldx, i64 ldy, i64 ld_residual, int each, int bias_type,
                 int columns, int part1, int part2, int part3, int rows, int steps, int waves, int streams) {
  constexpr Dtype Y = Dtype(V.x), T = mma_type(Y, V.whole), S = Dtype(V.scale), F = V.run == 0 && V.block ? S : Dtype::f32;
  using D = Decode<Element(V.element), T, V.zero != 0>;
  using P = Shape<V>;
  constexpr int R = V.run ? V.run : SLICES, RUNS = SLICES / R, NB = P::NB, JB = P::JB, TILE = P::FEATURES / 64;
  constexpr bool SCALE_SUMS = scales_sums(V), EXACT = scales_exactly(V);
  constexpr bool SCALE_PAIRS = V.run != 0 && !SCALE_SUMS && !EXACT;
  constexpr int SUM_BLOCKS = SCALE_SUMS ? NB : 1, ROWS = rows_of_token(Y, V.whole);

  extern __shared__ __align__(128) u8 shared[];
  let_next_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int kw = warp / (P::WN * P::WM), mw = warp / P::WN % P::WM, nw = warp % P::WN;
  const int tiles = n_padded / 64;
  const Divide group_of(V.run ? group / (16 * R) : 1), block_of(V.run && V.block ? columns / 64 : 1);
  const int in_row = V.run && V.block ? (n + columns - 1) / columns : n_padded; // scales in a row of their grid
  const int all = rows * ((tiles + TILE - 1) / TILE); // 31 bits reach for 4 TB of y
  const Output out{y, ldy, m / ROWS, n, bias, Dtype(bias_type), residual, ld_residual, each};
  const Factor factor{factors, n, columns, {part1, part2, part3}};

  // Whole tiles in turn, then the tiles that this block's share of the rest cuts. plan() keeps the products in 32 bits.
  auto share = [&](u32 block, u32 units) { return int(units * block / u32(streams)); };
  auto segment = [&](int turn) -> Segment {
    if (turn < waves) return {int(turn * gridDim.x + blockIdx.x), 0, steps};
    if (blockIdx.x >= streams) return {-1, 0, 0};
    const int whole = waves * gridDim.x, units = (all - whole) * steps;
    const int unit = share(blockIdx.x, units), unit_end = share(blockIdx.x + 1, units);
    const int tile = unit / steps + turn - waves;
    if (tile * steps >= unit_end) return {-1, 0, 0};
    return {whole + tile, max(0, unit - tile * steps), min(steps, unit_end - tile * steps)};
  };

  auto run_segment = [&](const Segment begun, int turn) {
    const int first = begun.first, last = begun.last;
    const int m0 = begun.id % rows * P::TOKENS, tile = begun.id / rows * TILE + nw * JB / 4;
    const int half = JB == 4 ? 0 : nw % 2;
    const bool inside = tile < tiles; // the last block of features may be short

    // A thread copies chunk c of every 32nd row of the stage; a row is one token's 64 k of one k part.
    const int c = threadIdx.x % 8, r = threadIdx.x / 8, token = r % P::TOKENS, k_of = r / P::TOKENS * 64 + c * 8;
    const u32 copy_to = shared_address(shared) + r * 128 + (c ^ r % 8) * 16;
    const u16* copy_from = x + (m0 + token) * ldx + k_of;
    auto copy_x = [&](int step, int ring) {
#pragma unroll
      for (int i = 0; i < P::STAGE / 16 / THREADS; i++) {
        const int down = i * 32 % P::TOKENS, from = step * P::STEP + i * 32 / P::TOKENS * 64;
        const int bytes = m0 + token + down < m ? max(0, min(16, (k - from - k_of) * 2)) : 0;
        copy16(copy_to + ring * P::STAGE + i * 32 * 128, copy_from + down * ldx + from, bytes);
      }
    };

    constexpr int WORDS = JB * D::WORDS, LOAD = WORDS < 4 ? WORDS : 4; // words of a lane in a slice, in one load
    constexpr int ZERO_WORDS = D::WORDS * JB / 4 ? D::WORDS * JB / 4 : 1;
    u32 q[SLICES][WORDS], zero_words[RUNS][ZERO_WORDS];
    Scales<S, V.block ? 1 : 2 * JB> scale[RUNS];
    auto has = [&](int step) { return inside && step < last && step * P::STEP + kw * 64 < k_padded; };
    auto slice_of = [&](int step) { return (step * P::WK + kw) * SLICES; };
    auto fetch_slice = [&](int i, int step, bool wanted) {
      const u32* from = qweight + ((i64(slice_of(step) + i) * tiles + tile) * 32 + lane) * D::TILE_WORDS + half * WORDS;
#pragma unroll
      for (int v = 0; v < WORDS; v += LOAD) load_if<D::TILE_WORDS == 4 && P::WM == 1, LOAD>(&q[i][v], from + v, wanted);
    };
    auto fetch_scale = [&](int r, int slice, bool wanted) {
      const u32 row = V.run == 0 ? 0 : group_of(u32(slice) / R);
      const u32 first = V.block ? block_of(tile) : tile * 64 + g * 8 + half * 4;
      if constexpr (V.run != 0) scale[r].load(scales + (i64(row) * in_row + first) * bytes_of(S), wanted);
      if constexpr (V.zero) {
#pragma unroll
        for (int h = 0; h < ZERO_WORDS; h++)
          if (wanted)
            zero_words[r][h] = qzeros[(i64(row) * tiles + tile) * 8 * D::WORDS + g * D::WORDS + (D::WORDS - 1) * half + h] >>
                               (D::WORDS == 1 ? 8 * half : 0);
      }
    };

#pragma unroll
    for (int i = 0; i < SLICES; i++) fetch_slice(i, first, has(first));
#pragma unroll
    for (int r = 0; r < RUNS; r++) fetch_scale(r, slice_of(first) + r * R, has(first));
    if (turn == 0) wait_for_previous(x); // the first weights wait neither for x nor for the kernel before
#pragma unroll
    for (int s = 0; s < P::STAGES - 1; s++) {
      if (first + s < last) copy_x(first + s, s);
      copy_commit();
    }

    float total[NB][JB][4] = {};
    for (int step = first, ring = 0; step < last; step++, ring = ring + 1 == P::STAGES ? 0 : ring + 1) {
      copy_wait<P::STAGES - 2>();
      __syncthreads();
      if (step + P::STAGES - 1 < last) copy_x(step + P::STAGES - 1, ring ? ring - 1 : P::STAGES - 1);
      copy_commit();
      if (!has(step)) continue;
      const bool more = has(step + 1);
      const u32 part = shared_address(shared) + ring * P::STAGE +
                       (kw * P::TOKENS + mw * 8 * NB + lane / 16 * 8 + lane % 8) * 128;
#pragma unroll
      for (int r = 0; r < RUNS; r++) {
        float run_sum[SUM_BLOCKS][JB][4] = {};
        u32 by[JB][2];
        if constexpr (EXACT) Scaled<Element(V.element), T, S>::rows(scale[r].word, by);
        Zero low[JB], high[JB];
#pragma unroll
        for (int j = 0; j < JB; j++) {
          low[j] = high[j] = D::fixed();
          if constexpr (V.zero) D::zeros(zero_words[r], j, low[j], high[j]);
        }
#pragma unroll
        for (int i = r * R; i < r * R + R; i++) {
          u32 b[NB / 2][4];
#pragma unroll
          for (int p = 0; p < NB / 2; p++)
            ldmatrix4(b[p], part + p * 16 * 128 + ((2 * i + lane / 8 % 2) ^ lane % 8) * 16);
#pragma unroll
          for (int j = 0; j < JB; j++) {
            u32 a[4];
            if constexpr (EXACT) {
              D::raw(&q[i][j * D::WORDS], a);
              Scaled<Element(V.element), T, S>::block(a, by[j][0], by[j][1]);
            } else {
              D::block(&q[i][j * D::WORDS], low[j], high[j], a);
            }
            if constexpr (SCALE_PAIRS) {
              const u32 s0 = scale[r].pair(2 * j), s1 = scale[r].pair(2 * j + 1);
              a[0] = mul2<T>(a[0], s0), a[1] = mul2<T>(a[1], s1), a[2] = mul2<T>(a[2], s0), a[3] = mul2<T>(a[3], s1);
            }
#pragma unroll
            for (int nb = 0; nb < NB; nb++) {
              if constexpr (SCALE_SUMS)
                mma<T>(run_sum[nb][j], a, b[nb / 2][nb % 2 * 2], b[nb / 2][nb % 2 * 2 + 1]);
              else
                mma<T>(total[nb][j], a, b[nb / 2][nb % 2 * 2], b[nb / 2][nb % 2 * 2 + 1]);
            }
          }
          fetch_slice(i, step + 1, more);
        }
        if constexpr (SCALE_SUMS) {
#pragma unroll
          for (int nb = 0; nb < NB; nb++)
#pragma unroll
            for (int j = 0; j < JB; j++)
#pragma unroll
              for (int c = 0; c < 4; c++)
                total[nb][j][c] = fmaf(scale[r].at(2 * j + c / 2), run_sum[nb][j][c], total[nb][j][c]);
        }
        if constexpr (V.run != 0) fetch_scale(r, slice_of(step + 1) + r * R, more);
      }
    }
    copy_wait<0>();
    __syncthreads(); // the ring is free

    // Worked out again rather than kept in registers through the loop; the empty asm hides that it is the same.
    asm volatile("" : "+r"(turn));
    const Segment done = segment(turn);
    const int row0 = done.id % rows * P::TOKENS, column0 = done.id / rows * P::FEATURES;

    // Sums of the k parts, in order, into the warps with kw = 0.
    constexpr int WARP_VECTORS = NB * JB * 32; // float4 of a warp's tile
    float4* sums = reinterpret_cast<float4*>(shared);
    const int mine = (mw * P::WN + nw) * WARP_VECTORS + lane;
    auto vector = [&](int nb, int j) -> float4& { return *reinterpret_cast<float4*>(total[nb][j]); };
    auto add = [&](int nb, int j, float4 v) {
      total[nb][j][0] += v.x, total[nb][j][1] += v.y, total[nb][j][2] += v.z, total[nb][j][3] += v.w;
    };
    if constexpr (P::WK > 1) {
      if (kw > 0) {
#pragma unroll
        for (int nb = 0; nb < NB; nb++)
#pragma unroll
          for (int j = 0; j < JB; j++)
            sums[(kw - 1) * (P::FLOATS / 4) + mine + (nb * JB + j) * 32] = vector(nb, j);
      }
      __syncthreads();
      if (kw == 0) {
        for (int w = 0; w < P::WK - 1; w++)
#pragma unroll
          for (int nb = 0; nb < NB; nb++)
#pragma unroll
            for (int j = 0; j < JB; j++) add(nb, j, sums[w * (P::FLOATS / 4) + mine + (nb * JB + j) * 32]);
      }
      __syncthreads();
    }

    if (done.last - done.first < steps) {
      // A share of a tile. Streaming block c owns units [units c / streams, ..); its first share goes to slot 2c, a later
      // one to 2c + 1.
      const int place = done.id - waves * gridDim.x; // among the tiles that are cut
      const int units = (all - waves * gridDim.x) * steps, start = place * steps;
      auto owner = [&](u32 unit) { return int(((unit + 1) * streams - 1) / u32(units)); };
      auto slot = [&](int c) {
        return reinterpret_cast<float4*>(scratch) + i64(2 * c + (share(c, units) < start)) * (P::FLOATS / 4) + mine;
      };
      if (kw == 0) {
        float4* to = slot(blockIdx.x);
#pragma unroll
        for (int nb = 0; nb < NB; nb++)
#pragma unroll
          for (int j = 0; j < JB; j++) to[(nb * JB + j) * 32] = vector(nb, j);
      }
      const int from = owner(start), until = owner(start + steps - 1);
      if (!last_to_arrive(counters + place, u32(until - from + 1))) return;
      if (kw == 0) {
#pragma unroll
        for (int nb = 0; nb < NB; nb++)
#pragma unroll
          for (int j = 0; j < JB; j++) vector(nb, j) = {0, 0, 0, 0};
        for (int c = from; c <= until; c++) {
          const float4* part = slot(c);
#pragma unroll
          for (int nb = 0; nb < NB; nb++)
#pragma unroll
            for (int j = 0; j < JB; j++) add(nb, j, __ldcg(part + (nb * JB + j) * 32));
        }
      }
    }

    // Rounded rows in shared memory, then out in 16-byte words.
    u16* staged = reinterpret_cast<u16*>(shared);
    const int from = nw * 16 * JB; // this warp's features
    if (kw == 0 && column0 + from < n_padded) {
      if constexpr (V.run == 0 && !V.block)
        scale[0].load(scales + (column0 + from / 64 * 64 + g * 8 + from % 64 / 8) * i64(bytes_of(S)));
#pragma unroll
      for (int j = 0; j < JB; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int column = from + 16 * j + 8 * h + g;
          float by = EXACT ? Scaled<Element(V.element), T, S>::UP : 1.0f;
          if constexpr (V.run == 0 && !V.block) by = scale[0].at(2 * j + h);
          const float whole = V.factor ? factor.of<F>(column0 + column) : 1.0f;
          const float plus = out.bias_at(column0 + column);
#pragma unroll
          for (int nb = 0; nb < NB; nb++) {
            const int row = (mw * NB + nb) * 8 + 2 * t;
            if constexpr (ROWS == 2) {
              const int token = (row0 + row) / 2;
              if (token < out.m)
                out.store<Y>(token, column0 + column,
                             (total[nb][j][2 * h] + total[nb][j][2 * h + 1]) * by * whole * row_factors[token]);
            } else {
#pragma unroll
              for (int c = 0; c < 2; c++) {
                const int token = row0 + row + c;
                float sum = total[nb][j][2 * h + c] * by * whole;
                if constexpr (V.whole) sum *= token < out.m ? row_factors[token] : 0.0f;
                if constexpr (Y == Dtype::f32)
                  out.store<Y>(token, column0 + column, sum);
                else
                  staged[(row + c) * P::ROW + column] =
                      from_float<Y>(out.ended<Y>(sum, plus, token, column0 + column));
              }
            }
          }
        }
    }
    __syncthreads();
    if constexpr (Y == Dtype::f32) return;
    for (int e = threadIdx.x; e < P::TOKENS * P::FEATURES / 8; e += THREADS) {
      const int token = e / (P::FEATURES / 8), column = e % (P::FEATURES / 8) * 8;
      out.store8(row0 + token, column0 + column,
                 *reinterpret_cast<const uint4*>(staged + token * P::ROW + column));
    }
    __syncthreads();
  };

  for (int turn = 0;; turn++) {
    const Segment part = segment(turn);
    if (part.id < 0) return;
    run_segment(part, turn);
  }
}
