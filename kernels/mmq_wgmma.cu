// y[m, n] = x[m, k] W^T for many rows on Hopper, from MMQ strips and x as it is: wgmma.cuh's pipeline with stages of 256 k
// of strips, as they lie. A warp takes two strips, or one. A decoded weight is rounded once, to the type of x.
//
// A lane's word of a strip holds k 4t .. 4t + 3, of which bytes 0 and 2 or 1 and 3 become a pair with fewest instructions,
// where an A fragment of 16 bits has 2t, 2t + 1, 2t + 8, 2t + 9: so x comes with the even ones of each 16 k before the odd
// ones (gather.cu).
#include "strips.cuh"
#include "wgmma.cuh"

struct Variant {
  int kind, x; // Kind, Dtype
  int factor;  // 1: sums over all of k have a factor of their own (decode.cuh)
  int features, tokens, cluster, stages, weight_stages; // Shape
};

// How codes become weights, rounded once.
enum class Way {
  EXACT, // e2m1 times a scale of one byte: a number of the type of x
  OWN,   // f16: the code times one scale, and perhaps plus a minimum
  SPLIT, // f16: the code times a product of scales, which is high + low: code * low is exact, adding code * high rounds
  FLOAT, // in fp32, where the code times a product of scales is exact
};
constexpr Way way_of(KindFacts f, Dtype x) {
  if (f.lookup && f.up == 1) return Way::EXACT; // a table of halves
  if (x != Dtype::f16) return Way::FLOAT;
  if (!f.coarse) return Way::OWN;
  // Scales of 11 bits and 7 leave six for low; all are multiples of 2^-24, so f16 holds them, up to 65504.
  return !f.minima && !f.lookup && f.bits + f.high - 1 + 6 <= 11 ? Way::SPLIT : Way::FLOAT;
}

template <Variant V>
struct Strips {
  using P = Strip<Kind(V.kind)>;
  static constexpr Shape SHAPE = {V.features, V.tokens, 1, V.cluster, 1, V.stages, V.weight_stages};
  static constexpr Dtype T = Dtype(V.x);
  static constexpr Way WAY = way_of(P::F, T);
  static constexpr int STEPS = DEPTH / STEP, RUN = 1, DECODING = 0, STRIPS = blocks_of(SHAPE);
  static constexpr bool FACTOR = V.factor, SUMS = false;
  static constexpr int BLOCK = 8 * P::BYTES; // of 128 rows
  using E2M1 = Scaled<Element::e2m1, T, P::S>;

  struct Stage {
    u8 strips[SHAPE.features / 16][P::BYTES];
  };
  struct Source {
    const u8* strips;
    int steps; // of 256 k
  };

  struct Copies {
    const u8* blocks;
    int steps, count;
    u32 bytes;

    DEVICE Copies(const Source& from, Place at, int features, int, int)
        : blocks(from.strips + i64(at.feature / 128) * from.steps * BLOCK), steps(from.steps), count(features / 128) {
      bytes = count * BLOCK;
    }
    DEVICE void prefetch(int begin, int end) const {
      for (int step = begin; step < end; step++)
        for (int i = 0; i < count; i++) prefetch_bulk(blocks + (i64(i) * steps + step) * BLOCK, BLOCK);
    }
    DEVICE void advance(int) {}
    DEVICE void copy(Stage& to, int step, u32 barrier) const {
      for (int i = 0; i < count; i++)
        copy_bulk(shared_address(to.strips[8 * i]), blocks + (i64(i) * steps + step) * BLOCK, BLOCK, barrier);
    }
  };

  struct Decoder {
    int strip, lane;
    DEVICE Decoder(const Source&, int warp, int lane) : strip(STRIPS * warp), lane(lane) {}
    DEVICE void begin(const Problem<Strips>&, const Segment&, int) {}
    DEVICE void scale_ahead(int) {}
    DEVICE void scale_now() {}

    // COUNT / 2 units of the pair p of a strip's units, each 32 k, as COUNT fragments of 16 k.
    template <int COUNT>
    DEVICE void slice(const Stage& stage, int p, int slice, int g, u32 (&a)[COUNT][STRIPS][4]) const {
#pragma unroll
      for (int j = 0; j < STRIPS; j++) {
        const u8* from = stage.strips[strip + j];
        P words;
        typename P::Factors bits;
        load_pair(from, p, words, bits);
        const Rows rows(from + P::LOW + P::HIGH, p, g);
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
          const int u = slice * (COUNT / 2) + i;
          u32 codes[4][2];
          pairs(words, bits, u, codes);
#pragma unroll
          for (int w = 0; w < 4; w++)
#pragma unroll
            for (int e = 0; e < 2; e++) a[2 * i + w / 2][j][w % 2 + 2 * e] = rows.weights(codes[w][e], u, w / 2, w % 2);
        }
      }
    }

    DEVICE void load_pair(const u8* strip, int p, P& words, typename P::Factors& bits) const {
      constexpr int VECTORS = P::F.bits / 4;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        const uint4 four = *reinterpret_cast<const uint4*>(strip + 512 * (VECTORS * p + v) + 16 * lane);
        words.low[4 * v] = four.x, words.low[4 * v + 1] = four.y, words.low[4 * v + 2] = four.z, words.low[4 * v + 3] = four.w;
      }
      if constexpr (P::F.high == 1) bits.fifth[0] = *reinterpret_cast<const u32*>(strip + P::LOW + 16 * lane + 4 * p);
      if constexpr (P::F.high == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(strip + P::LOW + 256 * p + 8 * lane);
        words.high[0] = two.x, words.high[1] = two.y;
      }
    }

    // Codes that are nothing but nibbles become pairs where they stand, those of the second unit four bits up.
    static constexpr bool NIBBLES = P::F.bits == 4 && P::F.high == 0 && !P::F.lookup;
    static constexpr bool SIGNED = !P::F.minima;
    static constexpr int BIAS = SIGNED ? 128 >> P::F.up : 0; // what makes a code unsigned
    static constexpr DEVICE int up(int unit) { return NIBBLES ? 4 * unit : P::F.up; }

    // The codes of unit u, for each register those of bytes 0 and 2, of bytes 1 and 3: code + BIAS, up(u) bits up, in the
    // mantissa of 1024 (FLOAT: of a subnormal f16, which fp32 takes with one conversion and no subtraction).
    static DEVICE void pairs(const P& words, const typename P::Factors& bits, int u, u32 (&codes)[4][2]) {
      constexpr u32 MAGIC = WAY == Way::FLOAT ? 0 : 0x64006400u;
      u32 bytes[4];
      if constexpr (WAY != Way::EXACT && !NIBBLES) words.template unit<SIGNED ? 0x80808080u : 0>(u, bits, bytes);
#pragma unroll
      for (int w = 0; w < 4; w++) {
        if constexpr (WAY == Way::EXACT) {
          u32 raw[4];
          Decode<Element::e2m1, T, false>::raw(words.low + w, raw);
          codes[w][0] = raw[2 * u], codes[w][1] = raw[2 * u + 1];
        } else if constexpr (NIBBLES) {
          const u32 field = 0x000F000Fu << up(u), flip = MAGIC ^ BIAS * 0x00010001u << up(u);
          codes[w][0] = lop3<AND_XOR>(words.low[w], field, flip);
          codes[w][1] = lop3<AND_XOR>(words.low[w] >> 8, field, flip);
        } else {
          codes[w][0] = prmt<0x4240>(bytes[w], MAGIC >> 8), codes[w][1] = prmt<0x4341>(bytes[w], MAGIC >> 8);
        }
      }
    }

    // The factors of rows g and g + 8 in 64 k.
    struct Rows {
      static constexpr int EACH = 32 / P::F.own; // scales of a unit
      static constexpr float RAISE = 1 << 24;    // codes and scales in subnormals are so much larger
      u32 high[2][2], low[2][2];                 // [row], pairs of f16 or T: see load
      float scale[2][2][EACH], offset[2][2][EACH];

      DEVICE Rows(const u8* plane, int p, int g) {
        if constexpr (WAY == Way::EXACT && EACH == 1) {
          const u32 both = prmt<0x5410>(half_at(plane + g * P::FINE + 2 * p), half_at(plane + (g + 8) * P::FINE + 2 * p));
          E2M1::scales(both, high[0][0], high[0][1]); // [0][unit]: of the two rows
        } else {
#pragma unroll
          for (int r = 0; r < 2; r++) load(plane, p, g + 8 * r, r);
        }
      }
      DEVICE void load(const u8* plane, int p, int row, int r) {
        const u8 *fine = plane + row * P::FINE, *coarse = plane + 16 * P::FINE + row * P::COARSE;
        if constexpr (WAY == Way::EXACT) {
          E2M1::scales(word_at(fine + 4 * p), high[r][0], high[r][1]); // [r][half]: of the two units
        } else if constexpr (P::F.pairs) {
          const uint2 two = *reinterpret_cast<const uint2*>(fine + 8 * p);
          high[r][0] = two.x, high[r][1] = two.y; // [r][unit]: scale and minimum
        } else {
          load_fine(fine, p, high[r]);
        }
        if constexpr (WAY == Way::SPLIT) {
          const u32 by = twice(half_at(coarse), 0);
#pragma unroll
          for (int u = 0; u < 2; u++) {
            const u32 own = high[r][u];
            high[r][u] = mul2<T>(own, by), low[r][u] = fma2<T>(own, by, high[r][u] ^ SIGNS);
          }
        }
        if constexpr (WAY == Way::FLOAT) in_floats(fine, coarse, p, r);
      }
      // Scales, or minima, of one level: of the two units, or of each unit's halves. Those of u6 are subnormals.
      static DEVICE void load_fine(const u8* fine, int p, u32 (&pair)[2]) {
        if constexpr (size_of(P::S) == 2) {
          pair[0] = word_at(fine + 4 * p);
        } else if constexpr (P::S == Dtype::u6) {
          pair[0] = prmt<0x4140>(half_at(fine + 2 * p), 0);
        } else {
          const u32 word = (EACH == 2 ? word_at(fine + 4 * p) : half_at(fine + 2 * p)) ^ 0x80808080u;
          pair[0] = add2<Dtype::f16>(prmt<0x4140>(word, 0x64), 0xE480E480u); // minus 1152
          if constexpr (EACH == 2) pair[1] = add2<Dtype::f16>(prmt<0x4342>(word, 0x64), 0xE480E480u);
        }
      }
      // What a code's subnormal is multiplied with, and what is added: one fma rounds, the rest is exact.
      DEVICE void in_floats(const u8* fine, const u8* coarse, int p, int r) {
        constexpr float LESS = NIBBLES ? 1.0f : P::FOLD;
        float by = RAISE * LESS, of_minima = 0;
        if constexpr (P::F.coarse) by = half_of(half_at(coarse), 0) * (P::S == Dtype::u6 ? RAISE * RAISE * LESS : RAISE * LESS);
        if constexpr (P::F.coarse && P::F.minima) of_minima = half_of(half_at(coarse + 2), 0) * -RAISE;
        u32 minima[2] = {};
        if constexpr (P::F.minima && !P::F.pairs) load_fine(fine + P::SUBS, p, minima);
#pragma unroll
        for (int u = 0; u < 2; u++) {
          const float by_unit = NIBBLES && u ? by / 16 : by;
#pragma unroll
          for (int h = 0; h < EACH; h++) {
            const u32 pair = high[r][EACH == 2 || P::F.pairs ? u : 0];
            scale[r][u][h] = half_of(pair, EACH == 2 ? h : P::F.pairs ? 0 : u) * by_unit;
            if constexpr (P::F.pairs)
              offset[r][u][h] = half_of(pair, 1);
            else if constexpr (P::F.minima)
              offset[r][u][h] = half_of(minima[0], u) * of_minima;
            else
              offset[r][u][h] = scale[r][u][h] * (-(BIAS << up(u)) / RAISE);
          }
        }
      }
      // A pair of codes of unit u, its half h, of row g + 8r.
      DEVICE u32 weights(u32 codes, int u, int h, int r) const {
        if constexpr (WAY == Way::EXACT) {
          if constexpr (P::S == Dtype::e8m0) codes = mul2<T>(codes, E2M1::STEP);
          return mul2<T>(codes, EACH == 1 ? twice(high[0][u], r) : twice(high[r][h], u));
        } else if constexpr (WAY == Way::FLOAT) {
          const int i = EACH == 2 ? h : 0;
          return pack<T>(fmaf(half_of(codes, 0), scale[r][u][i], offset[r][u][i]),
                         fmaf(half_of(codes, 1), scale[r][u][i], offset[r][u][i]));
        } else {
          // times 2^-up, minus 1024 * 2^-up + BIAS
          const u32 less = (15 - up(u) << 10) * 0x00010001u;
          const u32 taken = (25 - up(u) << 10 | BIAS << up(u)) * 0x00010001u | SIGNS;
          const u32 code = fma2<T>(codes, less, taken);
          if constexpr (WAY == Way::SPLIT)
            return fma2<T>(code, twice(high[r][u], h), mul2<T>(code, twice(low[r][u], h)));
          else if constexpr (P::F.pairs)
            return fma2<T>(code, twice(high[r][u], 0), twice(high[r][u], 1));
          else
            return mul2<T>(code, twice(high[r][0], u));
        }
      }
    };

    static DEVICE u32 half_at(const u8* from) { return *reinterpret_cast<const u16*>(from); }
    static DEVICE u32 word_at(const u8* from) { return *reinterpret_cast<const u32*>(from); }
    static DEVICE float half_of(u32 pair, int i) { return to_float<Dtype::f16>(u16(pair >> 16 * i)); }
  };

  template <class Times>
  static DEVICE void finish(const Problem<Strips>& p, int feature, int lane, Times times) {
    constexpr float UP = WAY == Way::EXACT ? E2M1::UP : 1.0f; // times a factor: still one rounding
#pragma unroll
    for (int v = 0; v < 2 * STRIPS; v++) {
      if constexpr (V.factor)
        times(v, p.factor.template of<Dtype::f32>(feature + lane / 4 + 8 * v) * UP);
      else if constexpr (UP != 1.0f)
        times(v, UP);
    }
  }
};

template <Variant V>
__global__ void __launch_bounds__(threads_of(Strips<V>::SHAPE), 1)
    mmq_wgmma(const u8* __restrict__ strips, const void* __restrict__ factors, const void* __restrict__ bias,
              const __grid_constant__ TensorMap gathered_map, u16* y, const void* residual, float* scratch, u32* counters,
              int m, int n, int k_padded, int n_padded, i64 ldy, i64 ld_residual, int each, int bias_type, int part1,
              int part2, int part3, int split) {
  const Output out{y, ldy, m, n, bias, Dtype(bias_type), residual, ld_residual, each};
  const Problem<Strips<V>> p{{strips, k_padded / DEPTH}, scratch, counters, out, k_padded, n_padded, split,
                             {factors, n, 0x7FFFFFFF, {part1, part2, part3}}};
  run<Strips<V>>(p, gathered_map);
}
