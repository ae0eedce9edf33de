// y[m, n] = x[m, k] W^T for m <= 8 from strips and x in 8 bits: time is the time of reading W once, so strips go from
// global memory straight into registers, where they are A fragments; tokens are the n8 of the MMA.
//
//   grid (columns of blocks, splits of k); a block takes neighbouring rows of strips and one range of k, its warps split
//   that range. A warp keeps x of 256 k at hand while it goes down the rows, which lie one after the other in memory, and
//   adds each strip's sums to a place of its own in shared memory. A chunk of rows is added over the warps in order,
//   then over the splits in order by the last block.
//
// For a row or a few every warp rounds the x it needs itself, which takes less time than a launch before this one.
#include "eights.cuh"
#include "strips.cuh"

struct Variant {
  int kind, y; // Kind, Dtype
  int grid;    // Dtype of scales that lie beside the strips
  int block;   // 1: each for a multiple of 128 k; 0: none, or for all of k, which is a factor
  int rounds;  // 1: x is y's type and is rounded here; 0: it comes in 8 bits (quantize.cu)
};

constexpr int THREADS = 512;
constexpr int TOKENS = UNITS / 2 * 36 + 32; // uint4 of a warp for x of a step

// Strips in flight, 2 to 4 kB each: as many as 128 registers hold where that was measured; elsewhere some kinds spill.
constexpr int ahead(Variant v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  return 1;
#else
  constexpr auto lean = [](KindFacts f) { return f.bits == 4 && f.high == 0 && f.own == 32 && !f.lookup; };
  return lean(facts(Kind(v.kind))) ? 2 : 1;
#endif
}

template <Variant V>
__global__ void __launch_bounds__(THREADS, 1)
    mmq_decode(const u8* __restrict__ strips, const u8* __restrict__ scales, const void* __restrict__ factors,
               const void* __restrict__ bias, const u32* quantized, const float* x_factors, u16* y, const void* residual,
               float* scratch, u32* counters, int m, int n, int k_padded, i64 ldy, i64 ld_residual, int each,
               int bias_type, int columns, int part1, int part2, int part3, int block_n, int block_k, int in_row,
               int in_column, int rows, int chunk, const void* x, int k, i64 ldx) {
  using P = Strip<Kind(V.kind)>;
  constexpr Dtype T = Dtype(V.y), G = Dtype(V.grid), F = P::FLOAT && !V.block ? G : Dtype::f32;
  constexpr int AHEAD = ahead(V), BLOCKS = P::FLOAT ? 2 : UNITS; // of x in a step that share a factor
  constexpr bool EARLY = P::F.bits == 8; // registers hold the factors of two strips: they are never waited for

  extern __shared__ __align__(16) u8 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  float4* slots = reinterpret_cast<float4*>(shared); // [chunk][warps][32]
  // What lanes need of x in a step: words [units / 2][32] of four, [unit][half] of token g; factors [units / 2][4] of four,
  // [unit][token] of tokens 2t, 2t + 1; sums [32] of token g in units t and t + 4, as two parts of 11 bits, lower, upper
  // ones. Registers are for strips in flight.
  uint4* const words_of_x = reinterpret_cast<uint4*>(shared) + chunk * warps * 32 + warp * TOKENS;
  uint4 *const factors_of_x = words_of_x + UNITS / 2 * 32, *const sums_of_x = factors_of_x + UNITS / 2 * 4;
  const int steps = k_padded / DEPTH;
  // plan() gives every warp a step or more and keeps the products in 32 bits.
  auto part = [&](u32 i) { return int(u32(steps) * i / (gridDim.y * warps)); };
  const int begin = part(blockIdx.y * warps + warp), end = part(blockIdx.y * warps + warp + 1);
  auto share = [&](u32 i) { return int(u32(rows) * i / gridDim.x); };
  const int top = share(blockIdx.x), bottom = share(blockIdx.x + 1);
  const Beside<G> beside(scales, block_n, block_k, in_row, in_column, n);

  P strip[AHEAD];
  typename P::Factors row_factors[AHEAD];
  u32 scale[AHEAD][2][2]; // of rows g, g + 8 in each 128 k, where they lie beside
  // AHEAD rows at one step of k: down the rows of a chunk, then along k, then the next chunk.
  struct Place {
    int row, step, first, last; // row and step; the chunk's rows
  };
  auto next_of = [&](Place at) -> Place {
    at.row += AHEAD;
    if (at.row >= at.last) at.row = at.first, at.step++;
    if (at.step == end) at = {at.last, begin, at.last, min(at.last + chunk, bottom)};
    return at;
  };
  auto from = [&](const Place& at, int i) -> FromGlobal {
    const int row = at.row + i;
    return {strips + ((i64(row / 8) * steps + at.step) * 8 + row % 8) * P::BYTES, row < at.last};
  };
  auto load_scales = [&](const Place& at, int i) {
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (at.row + i < at.last)
        scale[i][e / 2][e % 2] = beside.load((at.row + i) * 16 + 8 * (e / 2) + g, 2 * at.step + e % 2);
  };

  let_next_start();
  // The first loads of W wait neither for x nor for the kernel before.
  Place at = {top, begin, top, min(top + chunk, bottom)};
  if (top < bottom) { // always: a branch that the wait is not moved over
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const FromGlobal first = from(at, i);
#pragma unroll
      for (int p = 0; p < UNITS / 2; p++) strip[i].load(first, lane, p);
      row_factors[i].load(first, lane);
      if constexpr (V.block) load_scales(at, i);
    }
  }
  if constexpr (V.rounds)
    wait_for_previous(x);
  else
    wait_for_previous(quantized);
  const Output out{y, ldy, m, n, bias, Dtype(bias_type), residual, ld_residual, each};
  const Factor factor{factors, n, columns, {part1, part2, part3}};
  auto finish = [&](int row, float4 v) {
    const float sum[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int column = row * 16 + g + c / 2 * 8;
      out.store<T>(2 * t + c % 2, column, factors ? sum[c] * factor.of<F>(column) : sum[c]);
    }
  };

  constexpr int EACH = P::FLOAT ? 1 : 2; // factors of a block: d, or d and the sum of x
  auto split = [](float sum, int part) {
    const u32 upper = __float_as_uint(sum) & 0xFFFFE000u;
    return part ? upper : __float_as_uint(sum - __uint_as_float(upper));
  };
  auto fetch_x = [&](int step) {
    const u32* words = quantized + (i64(g) * k_padded + step * DEPTH) / 4 + t;
    auto factor_of = [&](int token, int i) {
      const float* at_step = x_factors + (i64(token) * steps + step) * BLOCKS * EACH;
      return __uint_as_float(load_or_zero(reinterpret_cast<const u32*>(at_step) + i, token < m));
    };
#pragma unroll
    for (int p = 0; p < UNITS / 2; p++) {
      u32 word[4];
#pragma unroll
      for (int i = 0; i < 4; i++) word[i] = load_or_zero(words + 16 * p + 4 * i, g < m);
      words_of_x[32 * p + lane] = {word[0], word[1], word[2], word[3]};
    }
    // A factor for each lane.
    const int p = lane / 8, unit = lane / 4 % 2 * 2, pair = lane % 4;
    float* const by = reinterpret_cast<float*>(factors_of_x) + 16 * p + 4 * pair + unit;
#pragma unroll
    for (int i = 0; i < 2; i++) by[i] = factor_of(2 * pair + i, (P::FLOAT ? p / 2 : 2 * p + unit / 2) * EACH) * P::FOLD;
    if constexpr (P::F.minima) {
      const float sum = factor_of(g, t * 2 + 1), sum4 = factor_of(g, (t + 4) * 2 + 1);
      sums_of_x[lane] = {split(sum, 0), split(sum4, 0), split(sum, 1), split(sum4, 1)};
    }
  };
  // A token after the other; a lane rounds eight neighbours. What lies there of tokens beyond m meets no other column.
  auto round_x = [&](int step) {
    constexpr Element E = P::FLOAT ? Element::e4m3 : Element::s8;
    constexpr int LANES = 32 / BLOCKS;
    u32* const words = reinterpret_cast<u32*>(words_of_x) + lane / 8 * 128 + lane % 2 * 8 + lane % 8 / 2;
    float* const by = reinterpret_cast<float*>(factors_of_x);
    u32* const sums = reinterpret_cast<u32*>(sums_of_x);
    const int first = step * DEPTH + 8 * lane, block = lane / LANES;
#pragma unroll 1
    for (int token = 0; token < m; token++) {
      float v[8];
      load8<T>(static_cast<const u8*>(x) + (token * ldx + first) * (T == Dtype::f32 ? 4 : 2), k - first, v);
      const Rounded r = rounded<E, LANES>(v);
      words[16 * token] = r.codes[0];
      words[16 * token + 4] = r.codes[1];
      if (lane % LANES) continue;
      if constexpr (P::FLOAT) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          by[((2 * block + i / 2) * 4 + token / 2) * 4 + i % 2 * 2 + token % 2] = r.d * P::FOLD;
      } else {
        by[(block / 2 * 4 + token / 2) * 4 + block % 2 * 2 + token % 2] = r.d * P::FOLD;
      }
      if constexpr (P::F.minima) {
        u32* const at_sum = sums + (token * 4 + block % 4) * 4 + block / 4;
        at_sum[0] = split(r.sum, 0);
        at_sum[2] = split(r.sum, 1);
      }
    }
  };

  while (at.first < bottom) {
    __syncwarp();
    if constexpr (V.rounds)
      round_x(at.step);
    else
      fetch_x(at.step);
    __syncwarp();
    const Place begun = at;
    do {
      const Place next = next_of(at);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const FromGlobal coming = from(next, i);
        const typename P::Factors by_row = row_factors[i];
        const u32 beside_row[2][2] = {{scale[i][0][0], scale[i][0][1]}, {scale[i][1][0], scale[i][1][1]}};
        auto load_factors = [&] {
          row_factors[i].load(coming, lane);
          if constexpr (V.block) load_scales(next, i);
        };
        if constexpr (EARLY) load_factors();
        float sums[4] = {}, of_block[4] = {};
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
          const uint4 words = words_of_x[u / 2 * 32 + lane], factors = factors_of_x[u / 2 * 4 + t];
          const u32 b[2] = {u % 2 ? words.z : words.x, u % 2 ? words.w : words.y};
          const float by[2] = {__uint_as_float(u % 2 ? factors.z : factors.x), __uint_as_float(u % 2 ? factors.w : factors.y)};
          u32 a[4];
          strip[i].unit(u, by_row, a);
          if constexpr (P::FLOAT) {
            mma_e4m3(of_block, a, b[0], b[1]);
            if (u % 4 == 3) {
#pragma unroll
              for (int c = 0; c < 4; c++) {
                const float own = V.block ? number<G>(beside_row[c / 2][u / 4], 0) : 1.0f;
                sums[c] = fmaf(own * by[c % 2], of_block[c], sums[c]);
                of_block[c] = 0;
              }
            }
          } else {
            constexpr int PARTS = 32 / P::F.own; // scales of a unit
#pragma unroll
            for (int h = 0; h < PARTS; h++) {
              int d[4];
              if constexpr (PARTS == 1)
                mma_s8(d, a, b[0], b[1]);
              else
                mma_s8(d, a + 2 * h, b[h]);
              const int part = u * PARTS + h;
              add_scaled<P::WIDE>(sums, d, by_row.scale(0, part), by_row.scale(1, part), by[0], by[1]);
            }
          }
          if (u % 2) strip[i].load(coming, lane, u / 2);
        }
        if constexpr (P::F.minima) {
          float a[4], of_strip[4] = {};
          by_row.minima(a);
          const uint4 both = sums_of_x[lane];
          mma_tf32(of_strip, a, __uint_as_float(both.x), __uint_as_float(both.y));
          mma_tf32(of_strip, a, __uint_as_float(both.z), __uint_as_float(both.w));
#pragma unroll
          for (int c = 0; c < 4; c++) sums[c] = fmaf(by_row.minimum_scale(c / 2), of_strip[c], sums[c]);
        }
        if constexpr (!EARLY) load_factors();
        if (at.row + i < at.last) {
          float4& slot = slots[((at.row + i - at.first) * warps + warp) * 32 + lane];
          if (at.step == begin)
            slot = {sums[0], sums[1], sums[2], sums[3]};
          else
            slot = {slot.x + sums[0], slot.y + sums[1], slot.z + sums[2], slot.w + sums[3]};
        }
      }
      at = next;
    } while (at.step == begun.step && at.first == begun.first);
    if (at.first != begun.first) {
      __syncthreads();
      for (int e = threadIdx.x; e < (begun.last - begun.first) * 32; e += blockDim.x) {
        if (2 * t >= m) continue;
        float4 sum = {};
        for (int w = 0; w < warps; w++) {
          const float4 v = slots[(e / 32 * warps + w) * 32 + lane];
          sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
        }
        const int row = begun.first + e / 32;
        if (gridDim.y == 1)
          finish(row, sum);
        else
          reinterpret_cast<float4*>(scratch)[(i64(blockIdx.y) * rows + row) * 32 + lane] = sum;
      }
      __syncthreads();
    }
  }
  if (gridDim.y > 1 && last_to_arrive(counters + blockIdx.x, gridDim.y))
    for (int row = top + warp; row < bottom; row += warps) {
      if (2 * t >= m) continue;
      float4 sum = {};
      for (int s = 0; s < int(gridDim.y); s++) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(scratch) + (i64(s) * rows + row) * 32 + lane);
        sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
      }
      finish(row, sum);
    }
}
