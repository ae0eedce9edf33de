// A strip's bytes -> A fragments of 8-bit numbers and their factors. A kind is a row of strips.h; nothing here names one.
//
// Lane 4g + t of a warp has rows g and g + 8. Unit u is 32 k: registers a0, a1 (rows g, g + 8) of its first 16 k, a2, a3
// of the others; two units share the words of 4-bit codes. kernels/mmq_strips.py defines the bytes.
#pragma once
#include "decode.cuh"
#include "imma.cuh"
#include "output.cuh"
#include "strips.h"

constexpr int DEPTH = 256, UNITS = DEPTH / 32;

constexpr int size_of(Dtype t) { return t == Dtype::u6 || t == Dtype::s8 ? 1 : bytes_of(t); }

// Number i of a word of factors, those of K-quants too.
template <Dtype S>
DEVICE float factor_at(u32 word, int i) {
  if constexpr (S == Dtype::u6)
    return __uint_as_float(prmt(word, 0x4B000000u, 0x7440u | i)) - 8388608.0f;
  else if constexpr (S == Dtype::s8)
    return __uint_as_float(prmt(word ^ 0x80808080u, 0x4B000000u, 0x7440u | i)) - 8388736.0f;
  else
    return number<S>(word, i);
}

// Where a strip lies, for its loads: W words at an offset in bytes.
struct FromGlobal {
  const u8* strip;
  bool wanted; // else registers keep what they had
  template <int W>
  DEVICE void load(u32* to, int offset) const {
    load_if<W == 4, W>(to, strip + offset, wanted);
  }
};

struct FromShared {
  const u8* strip;
  template <int W>
  DEVICE void load(u32* to, int offset) const {
    if constexpr (W == 4)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(strip + offset);
    else if constexpr (W == 2)
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(strip + offset);
    else
      *to = *reinterpret_cast<const u32*>(strip + offset);
  }
};

// Scales of type G that lie beside strips, one for block_n rows x block_k of k, which is a multiple of 128.
template <Dtype G>
struct Beside {
  const u8* scales;
  Divide row_of, block_of;
  int in_row, in_column, n;

  DEVICE Beside(const u8* scales, int block_n, int block_k, int in_row, int in_column, int n)
      : scales(scales), row_of(block_n), block_of(block_k / 128), in_row(in_row), in_column(in_column), n(n) {}
  // Of a row and its i-th 128 k; beyond the matrix everything else is zero.
  DEVICE u32 load(int row, int i) const {
    const int down = min(int(block_of(i)), in_column - 1), across = row_of(min(row, n - 1));
    return load_one<G>(scales + (i64(down) * in_row + across) * bytes_of(G));
  }
};

template <Kind K>
struct Strip {
  static constexpr KindFacts F = facts(K);
  static constexpr Dtype S = Dtype(F.fine);
  static constexpr bool FLOAT = F.own == DEPTH;  // codes that are e4m3, whose factors lie elsewhere
  static constexpr bool WIDE = S == Dtype::e8m0; // factors that may be as large as any float
  static constexpr int LOW = 512 * F.bits, HIGH = 512 * F.high;
  static constexpr int PARTS = 1 + F.minima, SUBS = DEPTH / F.own; // factors of a row
  static constexpr int FINE = FLOAT ? 0 : SUBS * size_of(S) * PARTS, COARSE = F.coarse * 2 * PARTS; // bytes of a row
  static constexpr int BYTES = F.strip;
  static_assert(LOW + HIGH + 16 * (FINE + COARSE) == BYTES);
  // Fragments hold the codes' values times 2^up.
  static constexpr float FOLD = 1.0f / (1 << F.up);
  static_assert(!F.minima || F.up == 0);

  // What all units of a strip need: factors, and fifth bits.
  struct Factors {
    u32 fine[2][FINE ? FINE / 4 : 1], coarse[2], fifth[4];

    template <class From>
    DEVICE void load(const From& from, int lane) {
      if constexpr (F.high == 1) from.template load<4>(fifth, LOW + 16 * lane);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = lane / 4 + 8 * r;
        if constexpr (FINE != 0) {
          constexpr int W = FINE / 4 < 4 ? FINE / 4 : 4;
#pragma unroll
          for (int w = 0; w < FINE / 4; w += W) from.template load<W>(fine[r] + w, LOW + HIGH + row * FINE + 4 * w);
        }
        if constexpr (F.coarse) from.template load<1>(coarse + r, LOW + HIGH + 16 * FINE + (row * COARSE & ~3));
      }
    }
    // The factor of row g + 8r in its i-th part of the strip.
    DEVICE float scale(int r, int i) const {
      constexpr int IN_WORD = 4 / size_of(S);
      float f = F.pairs ? number<Dtype::f16>(fine[r][i], 0) : factor_at<S>(fine[r][i / IN_WORD], i % IN_WORD);
      if constexpr (F.coarse) f *= of_strip(r, 0);
      return f;
    }
    // Of row g + 8r: its scale (0), its scale of minima (1). A word may hold the scales of two rows.
    DEVICE float of_strip(int r, int part) const {
      return number<Dtype::f16>(COARSE == 2 ? coarse[r] >> 16 * (threadIdx.x / 4 % 2) : coarse[r], part);
    }
    // Minima of 32 k each as the A fragment of mma_tf32: rows g, g + 8 at parts t, t + 4; minimum_scale is what they lack.
    DEVICE void minima(float (&a)[4]) const {
      const int t = threadIdx.x % 4;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32* row = fine[i % 2] + (F.pairs ? i / 2 * 4 : SUBS / 4 + i / 2);
        if constexpr (F.pairs) {
          const u32 even = t & 2 ? row[2] : row[0], odd = t & 2 ? row[3] : row[1];
          a[i] = number<Dtype::f16>(t & 1 ? odd : even, 1);
        } else {
          a[i] = factor_at<S>(*row, t);
        }
      }
    }
    DEVICE float minimum_scale(int r) const {
      if constexpr (F.coarse)
        return -of_strip(r, 1);
      else
        return 1.0f;
    }
  };

  u32 low[F.bits / 4 * 16], high[F.high == 2 ? 8 : 1];

  // What a lane holds of units 2p and 2p + 1.
  template <class From>
  DEVICE void load(const From& from, int lane, int p) {
    constexpr int VECTORS = F.bits / 4;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
      from.template load<4>(low + 4 * (VECTORS * p + v), 512 * (VECTORS * p + v) + 16 * lane);
    if constexpr (F.high == 2) from.template load<2>(high + 2 * p, LOW + 256 * p + 8 * lane);
  }

  // The A fragment of a unit; bytes XORed with FLIP.
  template <u32 FLIP = 0>
  DEVICE void unit(int u, const Factors& factors, u32 (&a)[4]) const {
    const int p = u / 2, s = u % 2;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const u32 v = low[4 * (F.bits == 8 ? u : p) + r];
      if constexpr (F.bits == 8) {
        a[r] = v ^ FLIP;
      } else if constexpr (F.lookup) {
        // Sixteen bytes are two PRMT of eight, and a third that takes from either as the codes' top bits say.
        const u32 eighth = v & 0x77777777u, which = lop3<AND_OR>(v >> 1, 0x44444444u, 0x32103210u);
        constexpr u32 T[4] = {F.table[0] ^ FLIP, F.table[1] ^ FLIP, F.table[2] ^ FLIP, F.table[3] ^ FLIP};
        const u32 first = prmt(prmt(T[0], T[1], eighth), prmt(T[2], T[3], eighth), which);
        const u32 second = prmt(prmt(T[0], T[1], eighth >> 16), prmt(T[2], T[3], eighth >> 16), which >> 16);
        a[r] = s ? prmt<0x7531>(first, second) : prmt<0x6420>(first, second);
      } else {
        constexpr u32 flip = (F.high && F.flip ? 0x80808080u : 0) ^ FLIP;
        constexpr u32 field = (0x0Fu << F.up) * 0x01010101u, top = ((1u << F.high) - 1 << (4 + F.up)) * 0x01010101u;
        const u32 nibbles = s ? v >> (4 - F.up) : v << F.up;
        if constexpr (F.high) {
          const int up = 4 + F.up - (F.high == 1 ? 2 * r + s : 2 * r);
          const u32 word = F.high == 1 ? factors.fifth[p] : high[u], bits = up < 0 ? word >> -up : word << up;
          a[r] = lop3<AND_OR>(nibbles, field, flip ? lop3<AND_XOR>(bits, top, flip) : bits & top);
        } else {
          a[r] = nibbles & field ^ FLIP;
        }
      }
    }
  }
};

// sums[16, 8] += factor * token * (MMA sums of one scale). Rows g, g + 8 have `scale`, columns 2t, 2t + 1 have `token`.
template <bool WIDE>
DEVICE void add_scaled(float (&sums)[4], const int (&d)[4], float scale, float scale8, float token, float token1) {
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const float by = c < 2 ? scale : scale8, x = c % 2 ? token1 : token;
    const float raised = __uint_as_float(u32(d[c]));
    if constexpr (WIDE)
      sums[c] = fmaf(by * x, raised - START_AT, sums[c]);
    else
      sums[c] = fmaf(x, fmaf(by, raised, -by * START_AT), sums[c]); // by * sum: its one rounding is the only one
  }
}
