// y[m, n] = x[m, k] W^T for m <= 32: time is nearly that of reading W once, so W goes from global memory straight into
// registers, and everything else keeps out of the way. A decoded fragment is multiplied with 8, 16 or 32 rows of x.
//
//   grid (columns of blocks, splits of k); a block takes every gridDim.x-th 64-wide tile and one range of k.
//   Its warps split that range; each keeps DEPTH k16 slices (16 or 32 bytes a lane) in flight, also across tiles, and
//   copies the x of the slices that come next to a place of its own in shared memory, where its sums go later.
//   Sums of a group are scaled in fp32, added over the warps in order, then over the splits in order by the last block.
//
// Of more than 8 rows, x would come from L2 as often as there are tiles, 2 bytes for each byte of W with 32: warps of two
// tiles share it, where SMs have two. x of the next loop body is copied while this one's is multiplied. Splits of k are the
// two blocks of a cluster, which read each other's sums: through memory that takes 2 us.
//
// A pair is y = silu(x G^T) * (x U^T), both products rounded to y's type first: half the warps of a block take a tile of
// G, the others the same tile of U. k is cut into as many parts as for one matrix, so that sums have the same bits.
#include "decode.cuh"
#include "output.cuh"
#include "silu.cuh"

struct Variant {
  int element, x, scale; // Element, Dtype, Dtype; x in f32 comes as pairs of f16 rows (pairs.cu)
  int zero;              // 1: zero points from qzeros
  int run;               // slices that share a scale: 1, 2, 4, 8; 0: one scale for all of k
  int block;             // 1: a scale for whole tiles of columns, or, when run is 0, no scale but the factor
  int factor;            // 1: sums over all of k have a factor of their own (decode.cuh)
  int pair;              // of two matrices: how many parts of k a warp takes, 1 or 2; 0: there is one matrix
  int tiles;             // of 8 rows of x: 1, 2, 4
  int whole;             // 1: rows of x are whole numbers as f16, with a factor each (quantize_rows.cu)
};

constexpr bool many_scales(Variant v) {
  return !v.block && Dtype(v.scale) == Dtype::f32 && v.run && v.run < 32 / facts(Element(v.element)).bits;
}
// Scales multiply the weights where that is exact, else sums of a run.
constexpr bool scales_exactly(Variant v) {
  return v.run && exact_product(Element(v.element), Dtype(v.x), Dtype(v.scale));
}
constexpr int RED = 68; // floats of a token's row in the reduction buffer: 64, and 4 to spread the banks

// Slices in flight. Short runs keep as many scales in flight as slices, so they keep fewer.
constexpr int depth(Variant v) { return facts(Element(v.element)).bits == 8 || v.run == 1 ? 4 : 8; }
// 128 registers for each of 16 warps, 168 of 12 for 16 rows of x, twice as many as 128 where many scales are in flight or
// sums of 32 rows. plan() knows it too.
constexpr int max_threads(Variant v) {
  const bool long_runs = v.run == 0 || v.run == depth(v);
  return many_scales(v) || v.tiles == 4 || (v.tiles == 2 && !long_runs) ? 256 : v.tiles == 2 ? 384 : 512;
}
// Where lanes share out scales, which leaves registers: with groups of 32 all four words of a lane spill.
constexpr bool spreads(Variant v) {
  return v.run == 2 && facts(Element(v.element)).bits == 4 && bytes_of(Dtype(v.scale)) == 2 && !v.block &&
         (!v.zero || v.pair == 2) && v.tiles == 1;
}
// Whether the second loop body's codes are brought into L2 before x is there, where a warp has no more of them.
constexpr bool prefetches(Variant v) { return v.run == depth(v) && !v.block && !v.pair; }

template <Variant V>
__global__ void __launch_bounds__(max_threads(V), 1)
    marlin_decode(const u8* __restrict__ qweight, const u8* __restrict__ scales, const u32* __restrict__ qzeros,
                  const void* __restrict__ factors, const void* __restrict__ bias, const u16* x, u16* y,
                  const void* residual, const float* row_factors, float* scratch, u32* counters, int m, int n, int k,
                  int n_padded, int k_padded, int group, i64 ldx, i64 ldy, i64 ld_residual, int each, int bias_type,
                  int columns, int part1, int part2, int part3, const u8* __restrict__ up_qweight,
                  const u8* __restrict__ up_scales, const u32* __restrict__ up_qzeros,
                  const void* __restrict__ up_factors, const void* __restrict__ up_bias, int up_bias_type, int wide,
                  int halved) {
  constexpr Dtype Y = Dtype(V.x), T = mma_type(Y, V.whole), S = Dtype(V.scale), F = V.run == 0 && V.block ? S : Dtype::f32;
  using D = Decode<Element(V.element), T, V.zero != 0>;
  constexpr bool EXACT = scales_exactly(V);
  constexpr int ROWS = rows_of_token(Y, V.whole);
  constexpr int DEPTH = depth(V), R = V.run ? V.run : 4, RUNS = DEPTH / R, TILES = V.tiles;
  constexpr int VECTORS = D::TILE_WORDS / 4; // 16-byte loads of a lane in one tile
  static_assert(TILES == 1 || (!V.pair && !V.whole && Y != Dtype::f32));
  static_assert(DEPTH % R == 0);
  // Zero points, or sums of more rows, leave no registers for all of a loop body's x.
  constexpr bool LATE_X = TILES > 1 || (V.zero && R == DEPTH);

  extern __shared__ __align__(1024) u8 dynamic[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  const int tiles = n_padded / 64, slices = k_padded / 16; // in a row of W, of which a pair may be a part
  // Of more than 8 rows, blocks take one tile or, when `wide` is 1, two at once, whose warps share x; two splits of k are a
  // cluster when `halved` is 1.
  constexpr bool SHARED = TILES > 1;
  const u32 splits = SHARED ? 1 + halved : gridDim.y, split = SHARED ? blockIdx.x & halved : blockIdx.y;
  const u32 column = SHARED ? blockIdx.x >> halved : blockIdx.x, step = SHARED ? gridDim.x >> halved : gridDim.x;
  const int count = V.pair ? (n + 63) / 64 : SHARED ? (tiles + wide) >> wide : tiles;
  constexpr int PARTS = V.pair ? V.pair : 1, MATRICES = V.pair ? 2 : 1;
  const bool up = V.pair && warp >= warps / 2;
  const int parts = (SHARED ? warps >> wide : warps / MATRICES) * PARTS; // of the block
  const int own = SHARED ? warp >> wide : (up ? warp - warps / 2 : warp) * PARTS, set = SHARED ? warp & wide : up;
  auto tile_at = [&](int group) { return SHARED ? min((group << wide) + set, tiles - 1) : group; };
  if (up) qweight = up_qweight, scales = up_scales, qzeros = up_qzeros;
  // Parts of whole loop bodies where k allows it, else of whole runs. plan() keeps the product in 32 bits.
  const u32 unit = slices % DEPTH ? R : DEPTH;
  auto bound = [&](u32 i) { return int(slices / unit * (split * parts + own + i) / (splits * parts) * unit); };
  const int first = bound(0), last = bound(PARTS), middle = PARTS == 2 ? bound(1) : last;
  const Divide block_of(V.run && V.block ? columns / 64 : 1);
  const int in_row = V.run && V.block ? (n + columns - 1) / columns : n_padded; // scales in a row of their grid
  // Runs share a row: run / runs_of_row as one multiplication, exact while run * runs_of_row is below 2^30.
  const u32 runs_of_row = V.run ? group / (16 * R) : 1, part_of_row = (0x80000000u + runs_of_row - 1) / runs_of_row;

  u32 q[DEPTH][D::TILE_WORDS], zero_words[RUNS][D::WORDS];
  typename Chosen<spreads(V), SpreadScales<S>, Scales<S, V.block ? 1 : 8>>::type scale[RUNS];
  // Where the coming loads read: slice by slice along a part of k, then the next one, then the next tile.
  auto first_end = [&] { return PARTS == 2 && first < middle ? middle : last; };
  int next_tile = column, next = first, next_end = first_end();
  const u8 *from, *scale_from;
  auto fetch_slice = [&](int i, bool wanted) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) load_if<VECTORS == 1, 4>(&q[i][4 * v], from + 16 * v, wanted);
    from += tiles * u32(512 * VECTORS);
  };
  auto aim_scales = [&](int group) {
    scale_from = scales + (tile_at(group) * 64 + g * 8) * i64(bytes_of(S));
  };
  auto aim = [&] {
    from = qweight + ((i64(next) * tiles + tile_at(next_tile)) * 32 + lane) * (16 * VECTORS);
    if constexpr (V.run != 0 && !V.block) aim_scales(next_tile);
  };
  auto advance = [&] {
    next += DEPTH;
    if (next < next_end) return;
    if (PARTS == 2 && next_end < last)
      next = middle, next_end = last;
    else
      next = first, next_end = first_end(), next_tile += step;
    aim();
  };
  auto fetch_scale = [&](int r, int group, int slice, bool wanted) {
    const int tile = tile_at(group);
    const u32 row = V.run ? __umulhi(u32(slice) / R * 2 + 1, part_of_row) : 0;
    const u8* of_tile = V.block ? scales + block_of(tile) * i64(bytes_of(S)) : scale_from;
    scale[r].load(of_tile + row * u64(in_row * bytes_of(S)), wanted);
    if constexpr (V.zero)
      load_if<false, D::WORDS>(zero_words[r], qzeros + ((i64(row) * tiles + tile) * 8 + g) * D::WORDS, wanted);
  };

  let_next_start();
  // The first loads of W wait neither for x nor for the kernel before.
  aim();
  if (next_tile < tiles) { // always: a branch that the wait is not moved over
#pragma unroll
    for (int i = 0; i < DEPTH; i++) fetch_slice(i, next + i < next_end);
    if constexpr (V.run != 0) {
#pragma unroll
      for (int r = 0; r < RUNS; r++) fetch_scale(r, next_tile, next + r * R, next + r * R < next_end);
    }
  }
  advance();
  if constexpr (prefetches(V)) {
    constexpr int LINES = 4 * VECTORS; // of 128 bytes, in a slice of a tile
    const bool second = next > first && next + DEPTH >= last;
    const u8* codes = from + lane / LINES * (tiles * u64(512 * VECTORS)) + lane % LINES * 128 - lane * (16 * VECTORS);
    prefetch(codes, second && next + lane / LINES < last);
    prefetch(scale_from + __umulhi(u32(next) / R * 2 + 1, part_of_row) * u64(in_row * bytes_of(S)), second);
  }

  wait_for_previous(x);
  // The warp's x of a loop body: a row of 16-byte chunks for each token, and one more to spread the banks. Of up to 8 tokens
  // it lies where the last sums of the same tile will, of more twice before the sums. Lanes, of all warps that share it,
  // share out chunks and rows, of which the last ones may have fewer or none.
  constexpr int CHUNKS = 2 * DEPTH, ROW = CHUNKS * 16 + 16;
  static_assert(SHARED || ROW <= RED * 4);
  const int at_once = 32 / CHUNKS << (SHARED ? wide : 0), passes = (m + at_once - 1) / at_once;
  constexpr bool AGAIN = __CUDA_ARCH__ < 900; // lanes without a row of their own copy others' again: a register less
  const int first_row = AGAIN ? min(lane / CHUNKS * passes, m - passes) : lane / CHUNKS * passes;
  const int row = SHARED ? set * (32 / CHUNKS) + lane / CHUNKS : first_row, chunk = lane % CHUNKS;
  float* sums = reinterpret_cast<float*>(dynamic + (SHARED ? 2 * parts * m * ROW : 0)); // [2][sets][parts][m][RED]
  auto part_of_sums = [&](int parity, int i) {
    return sums + ((parity * (SHARED ? 1 + wide : MATRICES) + set) * parts + own + i) * m * RED;
  };
  // Fragments of two slices at once, or of two tiles of tokens; a token beyond m is the last one again and is dropped.
  auto fragment_at = [&](int i) {
    return TILES == 1 ? min(lane % 8, m - 1) * ROW + lane / 8 * 16
                      : min(16 * i + lane / 16 * 8 + lane % 8, m - 1) * ROW + lane / 8 % 2 * 16;
  };
  const u32 copy_at = row * ROW + chunk * 16, lane_at = fragment_at(0), far_at = fragment_at(TILES / 4);
  const u16* const x_from = x + row * ldx + chunk * 8;
  u32 x_at = shared_address(part_of_sums(0, PARTS - 1)), x_next = 0;
  if constexpr (SHARED) x_next = shared_address(dynamic) + 2 * own * m * ROW, x_at = x_next + m * ROW;
  // Zeros beyond k and beyond `end`, where registers still hold other slices. plan() has k in whole chunks.
  auto copy_x = [&](int slice, int end) {
    const u16* from = x_from + slice * 16;
    const bool inside = slice * 16 + chunk * 8 < min(k, end * 16);
    u32 to = (SHARED ? x_next : x_at) + copy_at;
    if constexpr (SHARED) {
      // Lanes take rows in turns, four at a time: rows beyond m are left out one by one, and the loop's end is the same
      // for all lanes.
#pragma unroll 1
      for (int i = 0; i < m; i += 4 * at_once)
#pragma unroll
        for (int j = 0; j < 4; j++, from += at_once * ldx, to += at_once * ROW)
          copy16_or_zero_if(to, from, inside, i + j * at_once + row < m);
    } else {
#pragma unroll 1
      for (int i = 0; i < passes; i++, from += ldx, to += ROW)
        if (AGAIN || to < x_at + m * ROW) copy16_or_zero(to, from, inside);
    }
    copy_commit();
  };
  auto begin_x = [&] {
    if (first < last) copy_x(first, first_end());
  };
  begin_x();

  const int tokens = m / ROWS;
  const Output out{y, ldy, tokens, n, bias, Dtype(bias_type), residual, ld_residual, each};
  const Output up_out{y, ldy, tokens, n, up_bias, Dtype(up_bias_type)};
  auto scaled = [&](const void* factors, int token, int column, float sum) {
    if constexpr (V.factor) sum *= Factor{factors, n, columns, {part1, part2, part3}}.template of<F>(column);
    if constexpr (Y == Dtype::f32 || V.whole) sum *= row_factors[token];
    return sum;
  };
  auto finish = [&](int e, int tile, const float (&sum)[MATRICES]) {
    const int token = e / 64, column = tile * 64 + e % 64;
    const float alone = scaled(factors, token, column, sum[0]);
    if constexpr (!V.pair) {
      out.store<Y>(token, column, alone);
    } else {
      const float gate = nearest<Y>(__fadd_rn(alone, out.bias_at(column)));
      const float times = nearest<Y>(__fadd_rn(scaled(up_factors, token, column, sum[1]), up_out.bias_at(column)));
      out.put<Y>(token, column, __fmul_rn(silu(gate), times));
    }
  };
  auto partial = [&](int split, int matrix, int e, int tile) {
    return scratch + (i64(split * MATRICES + matrix) * tokens + e / 64) * (count * 64) + tile * 64 + e % 64;
  };
  int parity = 0;
  for (int tile = column; tile < count; tile += step, parity ^= 1) {
#pragma unroll 1
    for (int i = 0; i < PARTS; i++) {
      const int begin = i ? middle : first, end = i ? last : middle;
      float total[TILES][4][4] = {};
      if constexpr (V.run == 0 && !V.block) {
        aim_scales(tile);
        fetch_scale(0, tile, 0, true);
      }
      for (int slice = begin; slice < end; slice += DEPTH) {
        u32 b[TILES == 1 ? DEPTH / 2 : 2][TILES == 4 ? 2 : 1][4];
        // Of a slice and the next, after the last of which their place takes the x that comes next; or of a slice for all
        // tiles of tokens.
        auto fetch_x = [&](int i) {
          if (TILES == 1 && i % 2) return;
          u32(&to)[TILES == 4 ? 2 : 1][4] = b[TILES == 1 ? i / 2 : i % 2];
          ldmatrix4(to[0], x_at + lane_at + i * 32);
          if constexpr (TILES == 4) ldmatrix4(to[1], x_at + far_at + i * 32);
          if (SHARED || i + 2 < DEPTH) return;
          __syncwarp();
          if (next_tile == tile) copy_x(next, next_end);
        };
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
          const bool more = next_tile < count && (R == DEPTH || next + r * R < next_end);
          // Beyond the end x is zeros, and a scale that was never loaded may be no number.
          if (R < DEPTH && V.run) scale[r].keep_if(slice + r * R < end);
          if (r == 0) {
            copy_wait<0>();
            if constexpr (!SHARED) {
              __syncwarp();
            } else {
              if (wide)
                meet(1 + own, 64);
              else
                __syncwarp();
              const u32 arrived = x_next;
              x_next = x_at, x_at = arrived;
              fetch_x(0);
              if (next_tile < count) copy_x(next, next_end);
            }
          }
          if constexpr (!LATE_X) {
#pragma unroll
            for (int i = r * R; i < r * R + R; i++) fetch_x(i);
          }
          float group_sum[TILES][4][4] = {};
          auto& sum = V.run && !EXACT ? group_sum : total;
          u32 by[4][2];
          if constexpr (EXACT) Scaled<Element(V.element), T, S>::rows(scale[r].word, by);
          Zero low[4], high[4];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            low[j] = high[j] = D::fixed();
            if constexpr (V.zero) D::zeros(zero_words[V.run ? r : 0], j, low[j], high[j]);
          }
#pragma unroll
          for (int i = r * R; i < r * R + R; i++) {
            if constexpr (LATE_X && !SHARED) fetch_x(i);
            if constexpr (SHARED) {
              if (i + 1 < DEPTH) fetch_x(i + 1);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
              u32 a[4];
              if constexpr (EXACT) {
                D::raw(&q[i][j * D::WORDS], a);
                Scaled<Element(V.element), T, S>::block(a, by[j][0], by[j][1]);
              } else {
                D::block(&q[i][j * D::WORDS], low[j], high[j], a);
              }
#pragma unroll
              for (int of = 0; of < TILES; of++) {
                const u32* x2 = TILES == 1 ? b[i / 2][0] + i % 2 * 2 : b[i % 2][of / 2] + of % 2 * 2;
                mma<T>(sum[of][j], a, x2[0], x2[1]);
              }
            }
            fetch_slice(i, more);
          }
          if constexpr (V.run != 0) {
            if constexpr (!EXACT) {
              const auto by_run = scale[r].gathered();
#pragma unroll
              for (int j = 0; j < 4; j++)
#pragma unroll
                for (int of = 0; of < TILES; of++)
#pragma unroll
                  for (int c = 0; c < 4; c++)
                    total[of][j][c] = fmaf(by_run.at(2 * j + c / 2), group_sum[of][j][c], total[of][j][c]);
            }
            fetch_scale(r, next_tile, next + r * R, more);
          }
        }
        advance();
      }

      float* mine = part_of_sums(parity, i);
#pragma unroll
      for (int of = 0; of < TILES; of++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int c = 0; c < 4; c++) {
            const int token = 8 * of + 2 * t + c % 2;
            float v = total[of][j][c];
            if constexpr (V.run == 0 && !V.block) v *= scale[0].at(2 * j + c / 2);
            if constexpr (EXACT) v *= Scaled<Element(V.element), T, S>::UP;
            if (token < m) mine[token * RED + 16 * j + 8 * (c / 2) + g] = v;
          }
    }
    __syncthreads();
    if constexpr (SHARED) {
      auto sums_of = [&](int i, int part, int e) {
        return sums + (((parity * (1 + wide) + i) * parts + part) * m + e / 64) * RED + e % 64;
      };
      // Four columns at once; a block of a cluster ends a share of them.
      auto each = [&](int begin, int stride, auto&& of, auto&& give) {
#pragma unroll 1
        for (int i = 0; i <= wide; i++)
          for (int e = 4 * begin; e < m * 64 && (tile << wide) + i < tiles; e += 4 * stride) {
            float4 sum = {};
            auto add = [&](float4 more) { sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w; };
            of(i, e, add);
            give(i, e, sum);
          }
      };
      auto of_parts = [&](int i, int e, auto&& add) {
#pragma unroll 4
        for (int w = 0; w < parts; w++) add(*reinterpret_cast<const float4*>(sums_of(i, w, e)));
      };
      auto of_splits = [&](int i, int e, auto&& add) {
#pragma unroll 2
        for (int s = 0; s < int(splits); s++) add(load_of_block(shared_address(sums_of(i, 0, e)), s));
      };
      auto give_out = [&](int i, int e, float4 sum) {
        const float alone[4][1] = {{sum.x}, {sum.y}, {sum.z}, {sum.w}};
#pragma unroll
        for (int c = 0; c < 4; c++) finish(e + c, (tile << wide) + i, alone[c]);
      };
      if (splits == 1) {
        each(threadIdx.x, blockDim.x, of_parts, give_out);
      } else {
        each(threadIdx.x, blockDim.x, of_parts,
             [&](int i, int e, float4 sum) { *reinterpret_cast<float4*>(sums_of(i, 0, e)) = sum; });
        meet_cluster();
        each(split * blockDim.x + threadIdx.x, splits * blockDim.x, of_splits, give_out);
      }
    } else {
      if (tile + step < count) {
        x_at = shared_address(part_of_sums(parity ^ 1, PARTS - 1));
        begin_x();
      }
      for (int e = threadIdx.x; e < tokens * 64; e += blockDim.x) {
        float sum[MATRICES] = {};
#pragma unroll
        for (int i = 0; i < MATRICES; i++)
          for (int w = 0; w < parts; w++)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
              sum[i] += sums[(((parity * MATRICES + i) * parts + w) * m + e / 64 * ROWS + r) * RED + e % 64];
        if (gridDim.y == 1) {
          finish(e, tile, sum);
        } else {
#pragma unroll
          for (int i = 0; i < MATRICES; i++) *partial(blockIdx.y, i, e, tile) = sum[i];
        }
      }
      if (gridDim.y > 1 && last_to_arrive(counters + tile, gridDim.y))
        for (int e = threadIdx.x; e < tokens * 64; e += blockDim.x) {
          float sum[MATRICES] = {};
          for (int s = 0; s < int(gridDim.y); s++)
#pragma unroll
            for (int i = 0; i < MATRICES; i++) sum[i] += __ldcg(partial(s, i, e, tile));
          finish(e, tile, sum);
        }
    }
  }
  if (SHARED && splits > 1) leave_cluster();
}
