// y[m, n] = x[m, k] W^T on Hopper for more rows than marlin_decode takes, from marlin tiles: wgmma.cuh's pipeline with
// stages of 64 k, which hold x, weights, scales and zeros as they lie. A warp takes half a 64-wide tile, or a
// quarter.
#include "wgmma.cuh"

struct Variant {
  int element, x, scale; // Element, Dtype, Dtype
  int zero;              // 1: zero points from qzeros
  int rows;              // rows of scales in 64 k: 1, 2, 4; 0: one scale for all of k
  int block;             // 1: a scale for whole tiles of columns, or, when rows is 0, no scale but the factor
  int factor;            // 1: sums over all of k have a factor of their own (decode.cuh)
  int run;               // 2: k is a multiple of 128
  int sums;              // 1: scales multiply the sums of a run, which is within a group; 0: weights
  int features, tokens, ways, cluster, deep, stages; // Shape
};

// Scales multiply the 16-bit weights, where that rounds once (integers) or never, or fp32 sums: of a run, or of all of k.
constexpr bool is_float(Variant v) { return facts(Element(v.element)).exponent != 0; }
constexpr bool scales_exactly(Variant v) {
  return v.rows != 0 && exact_product(Element(v.element), Dtype(v.x), Dtype(v.scale));
}

// COUNT words side by side, aligned to all of them.
template <int COUNT>
DEVICE void load_shared(u32* to, const u8* from) {
  if constexpr (COUNT == 1) {
    to[0] = *reinterpret_cast<const u32*>(from);
  } else if constexpr (COUNT == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    static_assert(COUNT == 4);
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
}

template <Variant V>
struct Tiles {
  static constexpr Shape SHAPE = {V.features, V.tokens, V.ways, V.cluster, V.deep, V.stages, V.stages};
  static constexpr Element E = Element(V.element);
  static constexpr Dtype T = Dtype(V.x), S = Dtype(V.scale);
  static constexpr int STEPS = 1, BITS = facts(E).bits;
  static constexpr int BLOCKS = blocks_of(SHAPE), PARTS = 4 / BLOCKS; // a warp's part of a 64-wide tile
  static constexpr bool FACTOR = V.factor, EXACT = scales_exactly(V), SUMS = V.sums;
  static constexpr int RUN = V.run;
  static_assert(!SUMS || (V.rows == 1 && !EXACT));
  static constexpr int DECODING = (V.zero ? 12 : 0) + (BITS == 8 ? 8 : 0) + (S != T ? 8 : 0);

  static constexpr int SLICE = V.features * 2 * BITS;                        // bytes of 16 k
  static constexpr int ROW_BYTES = V.block || V.rows == 0 ? 0 : bytes_of(S); // of a column; 0: none in stages
  static constexpr int SCALES = V.features * ROW_BYTES, ZEROS = V.zero ? V.features * BITS / 8 : 0;
  static constexpr int ROWS = V.rows * (SCALES + ZEROS);

  struct Stage {
    u8 codes[STEP / 16][SLICE];
    u8 scales[ROWS ? ROWS : 16]; // rows of scales, then rows of zeros
  };
  struct Source {
    const u8 *codes, *scales, *zeros;
    int n_padded, group;
    int in_row; // scales in a row of a grid of block scales
  };

  struct Copies {
    const Source& from;
    const u8* codes;
    u64 pitch;
    int feature, run, row, left; // run: steps that share a row of scales
    u32 slice, scale, zero, bytes;

    DEVICE Copies(const Source& from, Place at, int features, int begin, int steps)
        : from(from), codes(from.codes + at.feature * 2 * BITS), pitch(u64(from.n_padded) * 2 * BITS), feature(at.feature) {
      slice = features * 2 * BITS, scale = features * ROW_BYTES, zero = features * BITS / 8;
      bytes = STEP / 16 * slice + V.rows * (scale + (V.zero ? zero : 0));
      run = from.group < STEP ? steps : from.group / STEP;
      row = uniform(begin / run), left = run - (begin - row * run);
    }
    DEVICE void prefetch(int begin, int end) const {
      for (int i = begin * (STEP / 16); i < end * (STEP / 16); i++) prefetch_bulk(codes + i * pitch, slice);
    }
    int first; // row of scales of this step
    DEVICE void advance(int step) {
      first = V.rows == 1 ? row : step * V.rows;
      if (--left == 0) row++, left = run;
    }
    DEVICE void copy(Stage& to, int step, u32 barrier) const {
#pragma unroll
      for (int i = 0; i < STEP / 16; i++)
        copy_bulk(shared_address(to.codes[i]), codes + (step * (STEP / 16) + i) * pitch, slice, barrier);
      const u32 scales = shared_address(to.scales);
#pragma unroll
      for (int r = 0; r < V.rows; r++) {
        const u64 at = u64(first + r) * from.n_padded + feature;
        if (ROW_BYTES) copy_bulk(scales + r * SCALES, from.scales + at * ROW_BYTES, scale, barrier);
        if (V.zero) copy_bulk(scales + V.rows * SCALES + r * ZEROS, from.zeros + at * BITS / 8, zero, barrier);
      }
    }
  };

  // Decodes a warp's rows: of a 64-wide tile, BLOCKS blocks from BLOCKS * part on.
  struct Decoder {
    using D = Decode<E, T, V.zero != 0>;
    const Source& from;
    int tile, part; // tile: of the block's 64-wide ones
    int lane;
    Divide run_of; // steps that share a row of the grid of block scales
    const u8* block;
    float now, ahead; // scales of a block; one is on its way while the step before is multiplied

    DEVICE Decoder(const Source& from, int warp, int lane)
        : from(from), tile(warp / PARTS), part(warp % PARTS), lane(lane), run_of(SUMS && V.block ? from.group / STEP : 1),
          now(0), ahead(0) {}

    DEVICE void begin(const Problem<Tiles>& p, const Segment& s, int warp) {
      if constexpr (SUMS && V.block) {
        const int feature = min(p.place(s.tile).feature + warp * 16 * BLOCKS, p.n_padded - 1);
        block = from.scales + uniform(feature / p.factor.columns) * bytes_of(S);
      }
    }
    DEVICE void scale_ahead(int step) {
      if constexpr (SUMS && V.block)
        ahead = number<S>(load_one<S>(block + i64(run_of(step)) * from.in_row * bytes_of(S)), 0);
    }
    DEVICE void scale_now() { now = ahead; }
    // Of the sums of a run: scale v belongs to row g + 8 v of the warp's 32.
    DEVICE void sum_scales(const Stage& stage, int g, float (&s)[2 * BLOCKS]) {
      constexpr int IN_WORD = 4 / bytes_of(S);
      const u32* words = reinterpret_cast<const u32*>(stage.scales + (tile * 64 + g * 8 + part * 2 * BLOCKS) * bytes_of(S));
#pragma unroll
      for (int v = 0; v < 2 * BLOCKS; v++) s[v] = V.block ? now : number<S>(words[v / IN_WORD], v % IN_WORD);
      scale_now();
    }

    template <int COUNT>
    DEVICE void slice(const Stage& stage, int, int slice, int g, u32 (&a)[COUNT][BLOCKS][4]) const {
#pragma unroll
      for (int i = 0; i < COUNT; i++) fragments(stage, slice * COUNT + i, g, a[i]);
    }

    // 16 k of a stage -> the A fragments of the warp's blocks, scaled: (q - zero) * scale rounded once.
    DEVICE void fragments(const Stage& stage, int slice, int g, u32 (&a)[BLOCKS][4]) const {
      constexpr int COUNT = BLOCKS * D::WORDS;
      u32 words[BLOCKS][D::WORDS];
      load_shared<COUNT>(&words[0][0], stage.codes[slice] + tile * 128 * BITS + (lane * PARTS + part) * COUNT * 4);
      const int row = slice * V.rows / 4, column = tile * 64 + g * 8; // the lane's eight columns, side by side
      Zero low[BLOCKS], high[BLOCKS];
      zeros(stage.scales + V.rows * SCALES + row * ZEROS + column * BITS / 8, low, high);
      const u8* scales = stage.scales + row * SCALES + (column + part * 2 * BLOCKS) * bytes_of(S);
      if constexpr (EXACT) {
        const int first = BLOCKS == 1 ? part % 2 : 0; // in the word of two blocks' scales
        u32 s[2][2];
        Scaled<E, T, S>::rows(reinterpret_cast<const u32*>(scales - 2 * first), s);
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
          D::raw(words[j], a[j]);
          Scaled<E, T, S>::block(a[j], first ? s[1][0] : s[j][0], first ? s[1][1] : s[j][1]);
        }
      } else if constexpr (SUMS || V.rows == 0 || is_float(V)) {
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) D::block(words[j], low[j], high[j], a[j]);
      } else if constexpr (S == T) {
        u32 pairs[BLOCKS];
        load_shared<BLOCKS>(pairs, scales);
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
          D::block(words[j], low[j], high[j], a[j]);
          const u32 s[2] = {twice(pairs[j], 0), twice(pairs[j], 1)};
#pragma unroll
          for (int i = 0; i < 4; i++) a[j][i] = mul2<T>(a[j][i], s[i % 2]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
          D::block(words[j], low[j], high[j], a[j]);
          const float s[2] = {scale_at(scales, 2 * j), scale_at(scales, 2 * j + 1)};
#pragma unroll
          for (int i = 0; i < 4; i++)
            a[j][i] = pack<T>(to_float<T>(u16(a[j][i])) * s[i % 2], to_float<T>(u16(a[j][i] >> 16)) * s[i % 2]);
        }
      }
    }

    static DEVICE float scale_at(const u8* scales, int i) {
      if constexpr (S == Dtype::f32)
        return reinterpret_cast<const float*>(scales)[i];
      else if constexpr (bytes_of(S) == 1)
        return number<S>(scales[i], 0);
      else
        return to_float<S>(reinterpret_cast<const u16*>(scales)[i]);
    }

    DEVICE void zeros(const u8* from, Zero (&low)[BLOCKS], Zero (&high)[BLOCKS]) const {
#pragma unroll
      for (int j = 0; j < BLOCKS; j++) low[j] = high[j] = D::fixed();
      if constexpr (V.zero) {
        const u32* word = reinterpret_cast<const u32*>(from);
        const int first = part * BLOCKS; // which is then block 0
        const u32 words[D::WORDS] = {BITS == 4 ? word[0] >> 4 * first : word[first / 2] >> 8 * (first % 2)};
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) D::zeros(words, j, low[j], high[j]);
      }
    }
  };

  // Scales of all of k, then factors; times(v, by) multiplies the sums of column feature + lane / 4 + 8 v.
  template <class Times>
  static DEVICE void finish(const Problem<Tiles>& p, int feature, int lane, Times times) {
    constexpr Dtype F = V.rows == 0 && V.block ? S : Dtype::f32;
#pragma unroll
    for (int v = 0; v < 2 * BLOCKS; v++) {
      if constexpr (V.rows == 0 && !V.block) {
        const int at = feature / 64 * 64 + lane / 4 * 8 + feature % 64 / 8 + v;
        times(v, number<S>(load_one<S>(p.source.scales + at * bytes_of(S)), 0));
      }
      float by = 1;
      if constexpr (EXACT) by = Scaled<E, T, S>::UP; // times a factor: still one rounding
      if constexpr (V.factor) by *= p.factor.template of<F>(feature + lane / 4 + 8 * v);
      if constexpr (EXACT || V.factor) times(v, by);
    }
  }
};

template <Variant V>
__global__ void __launch_bounds__(threads_of(Tiles<V>::SHAPE), 1)
    marlin_wgmma(const u8* __restrict__ qweight, const u8* __restrict__ scales, const u8* __restrict__ qzeros,
                 const void* __restrict__ factors, const void* __restrict__ bias,
                 const __grid_constant__ TensorMap x_map, u16* y, const void* residual, float* scratch, u32* counters,
                 int m, int n, int k, int n_padded, int group, i64 ldy, i64 ld_residual, int each, int bias_type,
                 int columns, int part1, int part2, int part3, int split) {
  const Output out{y, ldy, m, n, bias, Dtype(bias_type), residual, ld_residual, each};
  const Problem<Tiles<V>> p{{qweight, scales, qzeros, n_padded, group, (n + columns - 1) / columns},
                            scratch, counters, out, k, n_padded, split, {factors, n, columns, {part1, part2, part3}}};
  run<Tiles<V>>(p, x_map);
}
