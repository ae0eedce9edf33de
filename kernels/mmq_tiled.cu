// y[m, n] = x[m, k] W^T for m > 8 from strips and x in 8 bits. Eight warps share a block of 128 features, which are eight
// strips side by side, x 8 * blocks * strips tokens:
//
//   8 / strips warps along features, `strips` along tokens; a warp's tile is 16 * strips features x 8 * blocks tokens
//
// Strips, codes of x and their factors go through a ring of shared memory, 256 k a stage: the strips of a stage are one
// run of bytes; a row of x is 256 bytes, 16-byte chunk c of row r at chunk c ^ (r % 8); factors are turned to rows of
// tokens. A ring of one stage, for copies that do not run by themselves, is filled while nobody reads it. Sums of one
// scale are integers, exactly; the rest is fp32.
#include "strips.cuh"
#include "streams.cuh"

struct Variant {
  int kind, y; // Kind, Dtype
  int grid;    // Dtype of scales that lie beside the strips
  int block;   // 1: each for a multiple of 128 k; 0: none, or for all of k, which is a factor
  int blocks, strips, stages, resident;
};

constexpr int THREADS = 256;

template <Variant V>
struct Shape {
  using P = Strip<Kind(V.kind)>;
  static constexpr int NB = V.blocks, JB = V.strips, TOKENS = 8 * NB * JB, FEATURES = 128;
  static constexpr int LONG = TOKENS + 2; // floats of a row of factors, padded to spread the banks
  static constexpr int ROWS = P::FLOAT ? 2 : UNITS * P::PARTS;
  static constexpr int X = TOKENS * DEPTH, W = 8 * P::BYTES, FACTORS = ROWS * LONG * 4, STAGE = X + W + FACTORS;
  static constexpr int FLOATS = FEATURES * TOKENS;
  static constexpr int OUT = FEATURES + 8; // u16 of a token's row on the way out, padded likewise
  static_assert(TOKENS * OUT * 2 <= STAGE * V.stages && STAGE % 16 == 0);
};

template <Variant V>
__global__ void __launch_bounds__(THREADS, V.resident)
    mmq_tiled(const u8* __restrict__ strips, const u8* __restrict__ scales, const void* __restrict__ factors,
              const void* __restrict__ bias, const u8* quantized, const float* x_factors, u16* y, const void* residual,
              float* scratch, u32* counters, int m, int n, int k_padded, i64 ldy, i64 ld_residual, int each,
              int bias_type, int columns, int part1, int part2, int part3, int block_n, int block_k, int in_row,
              int in_column, int rows, int waves, int shares) {
  using S = Shape<V>;
  using P = typename S::P;
  constexpr Dtype T = Dtype(V.y), G = Dtype(V.grid), F = P::FLOAT && !V.block ? G : Dtype::f32;
  constexpr int NB = S::NB, JB = S::JB, EACH = P::FLOAT ? 1 : 2; // of x_factors for a block along k

  extern __shared__ __align__(128) u8 shared[];
  let_next_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int nw = warp / JB, mw = warp % JB;
  const int steps = k_padded / DEPTH;
  const Streams streams{rows * ((n + S::FEATURES - 1) / S::FEATURES), steps, waves, shares};
  const Output out{y, ldy, m, n, bias, Dtype(bias_type), residual, ld_residual, each};
  const Factor factor{factors, n, columns, {part1, part2, part3}};
  const Beside<G> beside(scales, block_n, block_k, in_row, in_column, n);

  for (int turn = 0;; turn++) {
    const Segment part = streams.segment(turn);
    if (part.id < 0) return;
    const int m0 = part.id % rows * S::TOKENS, tile = part.id / rows;

    const u8* strips_from = strips + i64(tile) * steps * S::W + threadIdx.x * 16;
    auto copy_strips = [&](int step, int ring) {
      const u32 stage = shared_address(shared) + ring * S::STAGE;
#pragma unroll
      for (int i = 0; i < (S::W / 16 + THREADS - 1) / THREADS; i++)
        if (i * THREADS + threadIdx.x < S::W / 16)
          copy16(stage + S::X + (i * THREADS + threadIdx.x) * 16, strips_from + i64(step) * S::W + i * THREADS * 16, 16);
    };
    auto copy_x = [&](int step, int ring) {
      const u32 stage = shared_address(shared) + ring * S::STAGE;
      const int c = threadIdx.x % 16, row = threadIdx.x / 16;
#pragma unroll
      for (int i = 0; i < S::TOKENS / 16; i++) {
        const int token = i * 16 + row;
        copy16(stage + token * DEPTH + (c ^ token % 8) * 16, quantized + i64(m0 + token) * k_padded + step * DEPTH + c * 16,
               m0 + token < m ? 16 : 0);
      }
      // d, then the sums of x where the kind has minima.
      constexpr int MANY = P::FLOAT ? 2 : UNITS * 2;
#pragma unroll
      for (int i = 0; i < (S::TOKENS * MANY + THREADS - 1) / THREADS; i++) {
        const int e = i * THREADS + threadIdx.x, token = e / MANY, which = e % MANY;
        const int to = P::FLOAT ? which : which / 2 + which % 2 * UNITS;
        if (token < S::TOKENS && to < S::ROWS)
          copy4(stage + S::X + S::W + (to * S::LONG + token) * 4,
                x_factors + (i64(m0 + token) * steps + step) * MANY + which, m0 + token < m);
      }
    };
    u32 scale[JB][2][2] = {}; // of rows g, g + 8 in each 128 k, where they lie beside
    auto load_scales = [&](int step) {
#pragma unroll
      for (int j = 0; j < JB; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          scale[j][e / 2][e % 2] =
              beside.load(tile * S::FEATURES + (nw * JB + j) * 16 + 8 * (e / 2) + g, 2 * step + e % 2);
    };

    // The first strips wait neither for x nor for the kernel before.
#pragma unroll
    for (int s = 0; s < V.stages - 1; s++)
      if (part.first + s < part.last) copy_strips(part.first + s, s);
    if constexpr (V.block) load_scales(part.first);
    if (turn == 0) wait_for_previous(quantized);
#pragma unroll
    for (int s = 0; s < V.stages - 1; s++) {
      if (part.first + s < part.last) copy_x(part.first + s, s);
      copy_commit();
    }

    float total[JB][NB][4] = {};
    for (int step = part.first, ring = 0; step < part.last; step++, ring = ring + 1 == V.stages ? 0 : ring + 1) {
      if constexpr (V.stages == 1) {
        __syncthreads();
        copy_strips(step, 0);
        copy_x(step, 0);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
      } else {
        copy_wait<V.stages - 2>();
        __syncthreads();
        if (step + V.stages - 1 < part.last) {
          copy_strips(step + V.stages - 1, ring ? ring - 1 : V.stages - 1);
          copy_x(step + V.stages - 1, ring ? ring - 1 : V.stages - 1);
        }
        copy_commit();
      }

      const u8* stage = shared + ring * S::STAGE;
      const u32 x = shared_address(stage) + (mw * 8 * NB + lane / 16 * 8 + lane % 8) * DEPTH;
      const float* by = reinterpret_cast<const float*>(stage + S::X + S::W) + mw * 8 * NB;
      FromShared from[JB];
      typename P::Factors by_row[JB];
#pragma unroll
      for (int j = 0; j < JB; j++) {
        from[j] = {stage + S::X + (nw * JB + j) * P::BYTES};
        by_row[j].load(from[j], lane);
      }
      float of_block[P::FLOAT ? JB : 1][P::FLOAT ? NB : 1][4] = {};
      P strip[JB];
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        u32 b[NB / 2][4];
#pragma unroll
        for (int p = 0; p < NB / 2; p++)
          ldmatrix4(b[p], x + p * 16 * DEPTH + ((2 * u + lane / 8 % 2) ^ lane % 8) * 16);
#pragma unroll
        for (int j = 0; j < JB; j++) {
          u32 a[4];
          if (u % 2 == 0) strip[j].load(from[j], lane, u / 2);
          strip[j].unit(u, by_row[j], a);
          if constexpr (P::FLOAT) {
#pragma unroll
            for (int nb = 0; nb < NB; nb++)
              mma_e4m3(of_block[j][nb], a, b[nb / 2][nb % 2 * 2], b[nb / 2][nb % 2 * 2 + 1]);
          } else {
            constexpr int PARTS = 32 / P::F.own; // scales of a unit
#pragma unroll
            for (int h = 0; h < PARTS; h++) {
              const float low = by_row[j].scale(0, u * PARTS + h), high = by_row[j].scale(1, u * PARTS + h);
#pragma unroll
              for (int nb = 0; nb < NB; nb++) {
                const float2 token = *reinterpret_cast<const float2*>(by + u * S::LONG + nb * 8 + 2 * t);
                int d[4];
                if constexpr (PARTS == 1)
                  mma_s8(d, a, b[nb / 2][nb % 2 * 2], b[nb / 2][nb % 2 * 2 + 1]);
                else
                  mma_s8(d, a + 2 * h, b[nb / 2][nb % 2 * 2 + h]);
                add_scaled<P::WIDE>(total[j][nb], d, low, high, token.x, token.y);
              }
            }
          }
        }
        if constexpr (P::FLOAT) {
          if (u % 4 == 3) {
#pragma unroll
            for (int j = 0; j < JB; j++)
#pragma unroll
              for (int nb = 0; nb < NB; nb++) {
                const float2 token = *reinterpret_cast<const float2*>(by + u / 4 * S::LONG + nb * 8 + 2 * t);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                  const float own = V.block ? number<G>(scale[j][c / 2][u / 4], 0) : 1.0f;
                  total[j][nb][c] = fmaf(own * (c % 2 ? token.y : token.x), of_block[j][nb][c], total[j][nb][c]);
                  of_block[j][nb][c] = 0;
                }
              }
          }
        }
      }
      if constexpr (P::F.minima) {
#pragma unroll
        for (int nb = 0; nb < NB; nb++) {
          float low[2], high[2]; // sums of x of token g in units t and t + 4, in two parts of 11 bits
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float sum = by[(UNITS + t + 4 * h) * S::LONG + nb * 8 + g];
            high[h] = __uint_as_float(__float_as_uint(sum) & 0xFFFFE000u);
            low[h] = sum - high[h];
          }
#pragma unroll
          for (int j = 0; j < JB; j++) {
            float a[4], of_strip[4] = {};
            by_row[j].minima(a);
            mma_tf32(of_strip, a, low[0], low[1]);
            mma_tf32(of_strip, a, high[0], high[1]);
#pragma unroll
            for (int c = 0; c < 4; c++)
              total[j][nb][c] = fmaf(by_row[j].minimum_scale(c / 2), of_strip[c], total[j][nb][c]);
          }
        }
      }
      if constexpr (V.block) {
        if (step + 1 < part.last) load_scales(step + 1);
      }
    }
    copy_wait<0>();
    __syncthreads(); // the ring is free

    if (part.last - part.first < steps) {
      const int place = part.id - streams.whole(), start = place * steps; // among the tiles that are cut
      auto slot = [&](int block) {
        return reinterpret_cast<float4*>(scratch) + i64(streams.slot(block, start)) * (S::FLOATS / 4) +
               warp * JB * NB * 32 + lane;
      };
      float4* to = slot(blockIdx.x);
#pragma unroll
      for (int e = 0; e < JB * NB; e++) to[e * 32] = *reinterpret_cast<float4*>(total[e / NB][e % NB]);
      const int first = streams.owner(start), last = streams.owner(start + steps - 1);
      if (!last_to_arrive(counters + place, u32(last - first + 1))) continue;
#pragma unroll
      for (int e = 0; e < JB * NB; e++) *reinterpret_cast<float4*>(total[e / NB][e % NB]) = {0, 0, 0, 0};
      for (int block = first; block <= last; block++) {
        const float4* of = slot(block);
#pragma unroll
        for (int e = 0; e < JB * NB; e++) {
          const float4 v = __ldcg(of + e * 32);
          float* sum = total[e / NB][e % NB];
          sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
      }
    }

    // Rounded rows in shared memory, then out in 16-byte words.
    u16* staged = reinterpret_cast<u16*>(shared);
#pragma unroll
    for (int j = 0; j < JB; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int feature = (nw * JB + j) * 16 + 8 * r + g, column = tile * S::FEATURES + feature;
        const float whole = P::FOLD * (factors ? factor.of<F>(column) : 1.0f), plus = out.bias_at(column);
#pragma unroll
        for (int nb = 0; nb < NB; nb++)
#pragma unroll
          for (int c = 0; c < 2; c++) {
            const int row = (mw * NB + nb) * 8 + 2 * t + c;
            const float sum = total[j][nb][2 * r + c] * whole;
            if constexpr (T == Dtype::f32)
              out.store<T>(m0 + row, column, sum);
            else
              staged[row * S::OUT + feature] = from_float<T>(out.ended<T>(sum, plus, m0 + row, column));
          }
      }
    __syncthreads();
    for (int e = threadIdx.x; T != Dtype::f32 && e < S::TOKENS * S::FEATURES / 8; e += THREADS) {
      const int token = e / (S::FEATURES / 8), feature = e % (S::FEATURES / 8) * 8;
      out.store8(m0 + token, tile * S::FEATURES + feature,
                 *reinterpret_cast<const uint4*>(staged + token * S::OUT + feature));
    }
    __syncthreads();
  }
}
