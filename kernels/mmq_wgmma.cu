// y[m, n] = x[m, k] W^T for many rows on Hopper, from MMQ strips and x as it is: wgmma.cuh's pipeline with stages of 256 k
// of strips, as they lie. A warp takes two strips. A decoded weight is rounded once, to the type of x.
//
// A lane's word of a strip holds k 4t .. 4t + 3, where an A fragment of 16 bits has 2t, 2t + 1, 2t + 8, 2t + 9: so x comes
// with the k of each 16 in the order that makes them the same (gather.cu).
#include "strips.cuh"
#include "wgmma.cuh"

struct Variant {
  int kind, x;        // Kind, Dtype
  int factor;         // 1: sums over all of k have a factor of their own (decode.cuh)
  int tokens, stages; // of a tile; of x
};

template <Variant V>
struct Strips {
  using P = Strip<Kind(V.kind)>;
  static constexpr Shape SHAPE = {256, V.tokens, 1, 1, V.stages, 2};
  static constexpr Dtype T = Dtype(V.x);
  static constexpr int STEPS = DEPTH / STEP, RUN = 1, DECODING = 16;
  static constexpr bool FACTOR = V.factor, SUMS = false;
  static constexpr int BLOCK = 8 * P::BYTES; // of 128 rows

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

    DEVICE Decoder(const Source&, int warp, int lane) : strip(2 * warp), lane(lane) {}
    DEVICE void begin(const Problem<Strips>&, const Segment&, int) {}
    DEVICE void scale_ahead(int) {}
    DEVICE void scale_now() {}

    // COUNT / 2 units of the pair p of a strip's units, each 32 k, as COUNT fragments of 16 k.
    template <int COUNT>
    DEVICE void slice(const Stage& stage, int p, int slice, int g, u32 (&a)[COUNT][2][4]) const {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u8* from = stage.strips[strip + j];
        P words;
        typename P::Factors bits;
        load_pair(from, p, words, bits);
        float coarse[2][2];
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
          for (int part = 0; part < P::PARTS; part++)
            coarse[r][part] = P::F.coarse ? half_at(from + P::LOW + P::HIGH + 16 * P::FINE + (g + 8 * r) * P::COARSE + 2 * part) : 1.0f;
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
          const int u = slice * (COUNT / 2) + i;
          u32 codes[4];
          words.unit(u, bits, codes);
#pragma unroll
          for (int w = 0; w < 4; w++) {
            const int r = w % 2, h = w / 2;
            const Line line(from + P::LOW + P::HIGH + (g + 8 * r) * P::FINE, 2 * p + u, h, coarse[r]);
            a[2 * i + h][j][r] = line.template at<0>(codes[w]);
            a[2 * i + h][j][2 + r] = line.template at<1>(codes[w]);
          }
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

    static DEVICE float half_at(const u8* from) { return to_float<Dtype::f16>(*reinterpret_cast<const u16*>(from)); }

    // code -> code * scale + offset, of one row and 32 or 16 k, rounded once.
    //
    // Where scales have T's own precision or make exact products, pairs of codes become pairs of 16 bits: the byte of
    // code + 128 in the mantissa of 1024 (bf16: code + 64 in that of 128), from which one fma takes that and what
    // fragments hold too much. Others go through fp32, where products of at most 24 bits are exact.
    struct Line {
      static constexpr Dtype S = P::S;
      static constexpr bool SMALL = T == Dtype::bf16; // pairs of bf16 hold codes of few bits
      static constexpr bool OWN = S == Dtype::f16 && !P::F.coarse && !P::F.minima;
      static constexpr bool PAIRS = S == Dtype::e4m3 || (SMALL ? S == Dtype::e8m0 : OWN);
      // 2^-up, and 1152 or 192 times that, negative, twice in a pair.
      static constexpr u32 LESS = (SMALL ? 127 - P::F.up << 7 : 15 - P::F.up << 10) * 0x00010001u;
      static constexpr u32 TAKEN =
          (SMALL ? 127 + 7 - P::F.up << 7 | 0x40 : 15 + 10 - P::F.up << 10 | 0x80) * 0x00010001u | SIGNS;
      static constexpr float BASE = 32768.0f + 128.0f; // 0x47000000 with a byte of code + 128 in bits 8 to 15
      static constexpr bool FUSED = OWN; // BASE times a scale of 11 bits is exact: taking it off and scaling are one fma
      float scale, offset;
      u32 pair;

      DEVICE Line(const u8* row, int unit, int half, const float (&coarse)[2]) {
        const int i = P::F.own == 16 ? 2 * unit + half : unit;
        float fine;
        if constexpr (P::F.pairs)
          fine = half_at(row + 4 * i);
        else if constexpr (size_of(S) == 1)
          fine = factor_at<S>(row[i], 0);
        else
          fine = half_at(row + 2 * i);
        pair = pack<T>(fine, fine);
        scale = fine * coarse[0] * P::FOLD, offset = FUSED ? -BASE * scale : 0;
        if constexpr (P::F.pairs)
          offset = half_at(row + 4 * i + 2);
        else if constexpr (P::F.minima)
          offset = -(factor_at<S>(row[P::SUBS + i], 0) * coarse[1]);
      }
      // Bytes 2I and 2I + 1 of a word of codes.
      template <int I>
      DEVICE u32 at(u32 codes) const {
        if constexpr (PAIRS) {
          const u32 word = SMALL ? lop3<AND_XOR>(codes, 0x7F7F7F7Fu, 0x40404040u) : codes ^ 0x80808080u;
          return mul2<T>(fma2<T>(prmt<I ? 0x4342 : 0x4140>(word, SMALL ? 0x43u : 0x64u), LESS, TAKEN), pair);
        } else {
          return pack<T>(one(codes ^ 0x80808080u, 2 * I), one(codes ^ 0x80808080u, 2 * I + 1));
        }
      }
      DEVICE float one(u32 word, int i) const {
        const float raised = __uint_as_float(prmt(word, 0x47000000u, 0x7504u | i << 4));
        return fmaf(FUSED ? raised : raised - BASE, scale, offset);
      }
    };
  };

  template <class Times>
  static DEVICE void finish(const Problem<Strips>& p, int feature, int lane, Times times) {
    if constexpr (V.factor) {
#pragma unroll
      for (int v = 0; v < 4; v++) times(v, p.factor.template of<Dtype::f32>(feature + lane / 4 + 8 * v));
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
