// Code words -> 16-bit pairs in MMA fragment order. An element is a decode function and a zero rule, nothing more.
//
// A 16 (k) x 64 (n) tile gives each lane 4g + t four column blocks j; block j is the A fragment (mma.cuh) of the
// weights 16j + g and 16j + 8 + g. kernels/marlin.py and formats/fragment.py define the bytes.
#pragma once
#include "elements.h"
#include "mma.cuh"

// The magic numbers: with code q in its low mantissa bits, MAGIC | q is the number BASE + q, exactly.
// f16: 0x6400 = 1024 (10 bits); bf16: 0x4300 = 128 (7 bits).
template <Dtype T>
constexpr u32 MAGIC = T == Dtype::f16 ? 0x64006400u : 0x43004300u;
constexpr u32 SIGNS = 0x80008000u;

// UP bits up, or down when it is negative.
template <int UP>
DEVICE u32 shift(u32 w) {
  if constexpr (UP < 0)
    return w >> -UP;
  else
    return w << UP;
}

// What a row of a block adds to its decoded codes, twice in a pair. `far` is for fields that sit four bits up.
struct Zero {
  u32 near, far;
};

// A float code of E whose exponent and mantissa stand in the lowest exponent and highest mantissa bits of a T is the
// same number but for a power of two, that of the two biases; subnormal codes too. POWER is that power, twice in a pair.
template <Dtype T>
constexpr int EXPONENT = T == Dtype::f16 ? 5 : 8;
template <Dtype T>
constexpr int MANTISSA = 15 - EXPONENT<T>;
template <Element E, Dtype T>
constexpr u32 POWER = (u32((1 << EXPONENT<T>) - 2 - facts(E).bias) << MANTISSA<T>) * 0x00010001u;

// Float codes, one with its top bit UP bits below the top of each half of `w`, where they stand in a pair of T.
template <Element E, Dtype T, int UP>
DEVICE u32 in_place(u32 w) {
  constexpr u32 field = ((1u << (facts(E).exponent + facts(E).mantissa)) - 1) << (MANTISSA<T> - facts(E).mantissa);
  const u32 magnitude = shift<UP - EXPONENT<T> + facts(E).exponent>(w) & field * 0x00010001u;
  return lop3<AND_OR>(shift<UP>(w), SIGNS, magnitude);
}
// The same as numbers; exact.
template <Element E, Dtype T, int UP>
DEVICE u32 widened(u32 w) {
  return mul2<T>(in_place<E, T, UP>(w), POWER<E, T>);
}

// E: the stored codes. T: f16 or bf16, the type of the MMA. WITH_ZERO: zero points from memory instead of E's bias.
template <Element E, Dtype T, bool WITH_ZERO>
struct Decode {
  static constexpr int BITS = facts(E).bits;
  static constexpr int WORDS = BITS / 4;       // words of a lane in one block
  static constexpr int TILE_WORDS = 4 * WORDS; // words of a lane in one tile
  static_assert(T == Dtype::f16 || T == Dtype::bf16);
  static constexpr bool FLOAT = facts(E).exponent != 0;
  static_assert(BITS == 4 || BITS == 8);
  static_assert(!FLOAT || BITS == 1 + facts(E).exponent + facts(E).mantissa);

  // Bytes 0 and 2 of `pair` as numbers minus 128. bf16 has seven bits: the eighth selects -128 or -256 as the addend.
  static DEVICE u32 centred(u32 pair) {
    u32 low = lop3<AND_OR>(pair, 0x007F007Fu, 0x43004300u);
    u32 high = lop3<AND_XOR>(pair, 0x00800080u, 0xC380C380u);
    return add2<T>(low, high);
  }

  // The zero of an element that carries its own: minus (BASE + bias), minus (BASE / 16 + bias).
  static constexpr DEVICE Zero fixed() {
    constexpr u32 bias = facts(E).bias;
    if constexpr (FLOAT) {
      return {};
    } else if constexpr (BITS == 8 && T == Dtype::bf16) {
      static_assert(bias == 0 || bias == 128);
      return {bias ? 0u : 0x43004300u, 0u};
    } else {
      return {SIGNS | MAGIC<T> | bias * 0x00010001u, 0xD400D400u | bias * 0x00100010u};
    }
  }

  // Zero words of a lane's eight columns -> the zeros of block j's two rows.
  // 4 bit: one word, nibbles j and j + 4. 8 bit: two words, bytes j % 2 and j % 2 + 2 of word j / 2.
  static DEVICE void zeros(const u32* words, int j, Zero& low, Zero& high) {
    u32 pair = BITS == 4 ? (words[0] >> 4 * j) & 0x000F000Fu : (words[j / 2 * (WORDS - 1)] >> 8 * (j % 2)) & 0x00FF00FFu;
    u32 near = BITS == 8 && T == Dtype::bf16 ? centred(pair) ^ SIGNS : pair | MAGIC<T> | SIGNS;
    u32 far = pair << 4 | 0xD400D400u;
    low = {both_low(near), both_low(far)};
    high = {both_high(near), both_high(far)};
  }

  // Float codes of one block as they stand in a T: without the power of two.
  static DEVICE void raw(const u32* w, u32 (&a)[4]) {
    if constexpr (BITS == 4 && T == Dtype::f16) {
      // Sign, exponent and mantissa fill the upper byte of an f16: four codes at once, then pairs.
      const u32 even = lop3<AND_OR>(w[0] << 4, 0x80808080u, w[0] << 1 & 0x0E0E0E0Eu);
      const u32 odd = lop3<AND_OR>(w[0], 0x80808080u, w[0] >> 3 & 0x0E0E0E0Eu);
      a[0] = prmt<0x2404>(even, 0);
      a[1] = even & 0xFF00FF00u;
      a[2] = prmt<0x2404>(odd, 0);
      a[3] = odd & 0xFF00FF00u;
    } else if constexpr (BITS == 4) {
      // One multiplication puts a code at bits 12 to 15, for its sign, and at 6 to 9, for the rest: the multiplier's
      // pipe has room where that of shifts and masks has none.
      const u32 far = w[0] >> 8;
      a[0] = multiply(w[0] & 0x000F000Fu, 0x1040) & 0x81C081C0u;
      a[1] = multiply(far & 0x000F000Fu, 0x1040) & 0x81C081C0u;
      a[2] = multiply(w[0] & 0x00F000F0u, 0x0104) & 0x81C081C0u;
      a[3] = multiply(far & 0x00F000F0u, 0x0104) & 0x81C081C0u;
    } else {
      a[0] = in_place<E, T, 16 - BITS>(w[0]);
      a[1] = in_place<E, T, BITS>(w[WORDS - 1]);
      a[2] = in_place<E, T, 16 - 2 * BITS>(w[0]);
      a[3] = in_place<E, T, 0>(w[WORDS - 1]);
    }
  }

  // Code words of one block -> its A fragment; every value is exact.
  static DEVICE void block(const u32* w, Zero low, Zero high, u32 (&a)[4]) {
    if constexpr (FLOAT) {
      raw(w, a);
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = mul2<T>(a[i], POWER<E, T>);
    } else if constexpr (BITS == 4 && T == Dtype::f16) {
      // Fields four bits up are 16 q: 1024 + 16 q, times 1/16, minus (64 + zero).
      u32 v = w[0], v8 = v >> 8;
      a[0] = add2<T>(lop3<AND_OR>(v, 0x000F000Fu, MAGIC<T>), low.near);
      a[1] = add2<T>(lop3<AND_OR>(v8, 0x000F000Fu, MAGIC<T>), high.near);
      a[2] = fma2<T>(lop3<AND_OR>(v, 0x00F000F0u, MAGIC<T>), 0x2C002C00u, low.far);
      a[3] = fma2<T>(lop3<AND_OR>(v8, 0x00F000F0u, MAGIC<T>), 0x2C002C00u, high.far);
    } else if constexpr (BITS == 4) {
      a[0] = add2<T>(lop3<AND_OR>(w[0], 0x000F000Fu, MAGIC<T>), low.near);
      a[1] = add2<T>(lop3<AND_OR>(w[0] >> 8, 0x000F000Fu, MAGIC<T>), high.near);
      a[2] = add2<T>(lop3<AND_OR>(w[0] >> 4, 0x000F000Fu, MAGIC<T>), low.near);
      a[3] = add2<T>(lop3<AND_OR>(w[0] >> 12, 0x000F000Fu, MAGIC<T>), high.near);
    } else if constexpr (T == Dtype::f16) {
      a[0] = add2<T>(prmt<0x4240>(w[0], MAGIC<T> >> 8), low.near);
      a[1] = add2<T>(prmt<0x4240>(w[1], MAGIC<T> >> 8), high.near);
      a[2] = add2<T>(prmt<0x4341>(w[0], MAGIC<T> >> 8), low.near);
      a[3] = add2<T>(prmt<0x4341>(w[1], MAGIC<T> >> 8), high.near);
    } else {
      a[0] = centred(w[0]);
      a[1] = centred(w[1]);
      a[2] = centred(w[0] >> 8);
      a[3] = centred(w[1] >> 8);
      if constexpr (WITH_ZERO || facts(E).bias != 128) {
        a[0] = add2<T>(a[0], low.near);
        a[1] = add2<T>(a[1], high.near);
        a[2] = add2<T>(a[2], low.near);
        a[3] = add2<T>(a[3], high.near);
      }
    }
  }
};

// Activations in f32 come as two rows of f16 for each token, one after the other (pairs.cu), whose products add up. Whole
// numbers (quantize_rows.cu) are a row of f16 whatever x was. Both have a factor for each token.
constexpr Dtype mma_type(Dtype x, bool whole) { return x == Dtype::f32 || whole ? Dtype::f16 : x; }
constexpr int rows_of_token(Dtype x, bool whole) { return x == Dtype::f32 && !whole ? 2 : 1; }

constexpr int bytes_of(Dtype t) { return t == Dtype::f32 ? 4 : t == Dtype::e8m0 || t == Dtype::e4m3 ? 1 : 2; }

// One number of any scale type, on its own.
template <Dtype S>
DEVICE u32 load_one(const void* from) {
  if constexpr (bytes_of(S) == 4)
    return __ldg(static_cast<const u32*>(from));
  else if constexpr (bytes_of(S) == 2)
    return __ldg(static_cast<const u16*>(from));
  else
    return __ldg(static_cast<const u8*>(from));
}

// Number i of a word of scales of type S, exactly.
template <Dtype S>
DEVICE float number(u32 word, int i) {
  if constexpr (S == Dtype::f32) {
    return __uint_as_float(word);
  } else if constexpr (S == Dtype::e8m0) {
    // 2^(code - 127): the exponent of a float32, below which code 0 is the subnormal 2^-127.
    return __uint_as_float(max((word >> 8 * i & 0xFFu) << 23, 0x00400000u));
  } else if constexpr (S == Dtype::e4m3) {
    const u32 pair = i % 2 ? widened<Element::e4m3, Dtype::f16, 0>(word) : widened<Element::e4m3, Dtype::f16, 8>(word);
    return to_float<Dtype::f16>(u16(pair >> 16 * (i / 2)));
  } else {
    return to_float<S>(u16(word >> 16 * i));
  }
}

// Whether a code times a scale of one byte is a number of T, to the bit: then scales may multiply the weights.
constexpr bool exact_product(Element e, Dtype t, Dtype s) {
  const bool e4m3 = s == Dtype::e4m3 && (t == Dtype::f16 || t == Dtype::bf16), e8m0 = s == Dtype::e8m0 && t == Dtype::bf16;
  return e == Element::e2m1 && (e4m3 || e8m0);
}

// Such weights are kept 2^-DOWN as large, and finished sums multiplied by 2^DOWN: so the largest product is in range, and
// for e4m3 the scale takes the code's power of two along. The smallest is exact too (subnormal f16: steps of 2^-17).
template <Element E, Dtype T, Dtype S>
struct Scaled {
  static constexpr int DOWN = S == Dtype::e8m0 ? 3 : T == Dtype::f16 ? 7 : 8;
  // 2^(the power of the raw code - DOWN), twice in a pair.
  static constexpr u32 STEP = POWER<E, T> - u32(DOWN << MANTISSA<T>) * 0x00010001u;
  static constexpr float UP = 1 << DOWN;

  // Four scales side by side as pairs of T: 0 and 2, 1 and 3.
  static DEVICE void scales(u32 w, u32& even, u32& odd) {
    if constexpr (S == Dtype::e4m3) {
      even = mul2<T>(widened<Element::e4m3, T, 8>(w), STEP);
      odd = mul2<T>(widened<Element::e4m3, T, 0>(w), STEP);
    } else { // the exponent of a bf16, below which code 0 is the subnormal 2^-127
      even = max2(w << 7 & 0x7F807F80u, 0x00400040u);
      odd = max2(w >> 1 & 0x7F807F80u, 0x00400040u);
    }
  }
  // Of rows g and g + 8 of block j, from words of four scales: each twice in a pair.
  template <int BLOCKS>
  static DEVICE void rows(const u32* words, u32 (&s)[BLOCKS][2]) {
#pragma unroll
    for (int j = 0; j < BLOCKS; j += 2) {
      u32 even, odd;
      scales(words[j / 2], even, odd);
      s[j][0] = twice(even, 0), s[j + 1][0] = twice(even, 1), s[j][1] = twice(odd, 0), s[j + 1][1] = twice(odd, 1);
    }
  }
  // A block's A fragment from its raw codes and the scales of its two rows, each twice in a pair.
  static DEVICE void block(u32 (&a)[4], u32 low, u32 high) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (S == Dtype::e8m0) a[i] = mul2<T>(a[i], STEP);
      a[i] = mul2<T>(a[i], i % 2 ? high : low);
    }
  }
};

// COUNT scales of a lane's columns g + 8v, from v = 0 (8) or from half a tile on (4); 2j, 2j + 1 are the rows of block j.
// COUNT = 1: one scale for all columns of the tile.
template <Dtype S, int COUNT = 8>
struct Scales {
  static constexpr int IN_WORD = COUNT == 1 ? 1 : 4 / bytes_of(S);
  static constexpr int WORDS = COUNT / IN_WORD;
  u32 word[WORDS];

  // `from` is the lane's first scale of a row of the grid, aligned to COUNT of them.
  DEVICE void load(const void* from, bool wanted = true) {
    if constexpr (COUNT == 1) {
      if (wanted) word[0] = load_one<S>(from);
    } else {
      constexpr int STEP = WORDS < 4 ? WORDS : 4;
#pragma unroll
      for (int i = 0; i < WORDS; i += STEP) load_if<false, STEP>(word + i, static_cast<const u32*>(from) + i, wanted);
    }
  }
  DEVICE float at(int v) const {
    if constexpr (COUNT == 1)
      return number<S>(word[0], 0);
    else
      return number<S>(word[v / IN_WORD], v % IN_WORD);
  }
  DEVICE const Scales& gathered() const { return *this; } // see SpreadScales
  DEVICE void keep_if(bool wanted) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) word[i] = wanted ? word[i] : 0;
  }
  // The same scale twice, to multiply a pair: only where S is the type of the pair, so that the product rounds once.
  DEVICE u32 pair(int v) const { return v % 2 ? both_high(word[v / 2]) : both_low(word[v / 2]); }
};

template <bool FIRST, typename A, typename B>
struct Chosen {
  using type = A;
};
template <typename A, typename B>
struct Chosen<false, A, B> {
  using type = B;
};

// The same of two bytes each, shared out: each of the four lanes that need all eight holds a word of them.
template <Dtype S>
struct SpreadScales {
  u32 word;

  // `from` is the first scale, as for Scales.
  DEVICE void load(const void* from, bool wanted) {
    load_if<false, 1>(&word, static_cast<const u32*>(from) + threadIdx.x % 4, wanted);
  }
  DEVICE void keep_if(bool wanted) { word = wanted ? word : 0; }
  // All of them; every lane of the warp takes part.
  DEVICE Scales<S> gathered() const {
    Scales<S> all;
#pragma unroll
    for (int i = 0; i < 4; i++) all.word[i] = __shfl_sync(~0u, word, i, 4);
    return all;
  }
};

// A factor that only sums over all of k need: of the whole, of each of up to four fused parts, or of `columns` columns.
struct Factor {
  const void* at;
  int n, columns;
  int part[3]; // first columns of the parts but the first; beyond n where there are fewer

  template <Dtype S>
  DEVICE float of(int column) const {
    const int c = min(column, n - 1), i = c / columns + (c >= part[0]) + (c >= part[1]) + (c >= part[2]);
    return number<S>(load_one<S>(static_cast<const u8*>(at) + i64(i) * bytes_of(S)), 0);
  }
};

// v / by as a multiplication, exact while v * by fits 32 bits.
struct Divide {
  u32 by, reciprocal;
  explicit DEVICE Divide(u32 by) : by(by), reciprocal(0xFFFFFFFFu / by + 1) {}
  DEVICE u32 operator()(u32 v) const { return by == 1 ? v : __umulhi(v, reciprocal); }
};
