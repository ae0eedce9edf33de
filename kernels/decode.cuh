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

// What a row of a block adds to its decoded codes, twice in a pair. `far` is for fields that sit four bits up.
struct Zero {
  u32 near, far;
};

// E: the stored codes. T: f16 or bf16, the type of the MMA. WITH_ZERO: zero points from memory instead of E's bias.
template <Element E, Dtype T, bool WITH_ZERO>
struct Decode {
  static constexpr int BITS = facts(E).bits;
  static constexpr int WORDS = BITS / 4;       // words of a lane in one block
  static constexpr int TILE_WORDS = 4 * WORDS; // words of a lane in one tile
  static_assert(T == Dtype::f16 || T == Dtype::bf16);
  static_assert(facts(E).exponent == 0 && (BITS == 4 || BITS == 8), "float codes need a branch in block()");

  // Bytes 0 and 2 of `pair` as numbers minus 128. bf16 has seven bits: the eighth selects -128 or -256 as the addend.
  static DEVICE u32 centred(u32 pair) {
    u32 low = lop3<AND_OR>(pair, 0x007F007Fu, 0x43004300u);
    u32 high = lop3<AND_XOR>(pair, 0x00800080u, 0xC380C380u);
    return add2<T>(low, high);
  }

  // The zero of an element that carries its own: minus (BASE + bias), minus (BASE / 16 + bias).
  static constexpr DEVICE Zero fixed() {
    constexpr u32 bias = facts(E).bias;
    if constexpr (BITS == 8 && T == Dtype::bf16) {
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

  // Code words of one block -> its A fragment; every value is exact.
  static DEVICE void block(const u32* w, Zero low, Zero high, u32 (&a)[4]) {
    if constexpr (BITS == 4 && T == Dtype::f16) {
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

// COUNT scales of a lane's columns g + 8v, from v = 0 (8) or from half a tile on (4); 2j, 2j + 1 are the rows of block j.
template <Dtype S, int COUNT = 8>
struct Scales {
  static constexpr int WORDS = S == Dtype::f32 ? COUNT : COUNT / 2;
  u32 word[WORDS];

  // `from` is the lane's first scale of a row of the grid, aligned to COUNT of them.
  DEVICE void load(const void* from, bool wanted = true) {
    constexpr int STEP = WORDS < 4 ? WORDS : 4;
#pragma unroll
    for (int i = 0; i < WORDS; i += STEP) load_if<false, STEP>(word + i, static_cast<const u32*>(from) + i, wanted);
  }
  DEVICE float at(int v) const {
    if constexpr (S == Dtype::f32)
      return __uint_as_float(word[v]);
    else
      return to_float<S>(u16(word[v / 2] >> 16 * (v % 2)));
  }
  // The same scale twice, to multiply a pair: only where S is the type of the pair, so that the product rounds once.
  DEVICE u32 pair(int v) const { return v % 2 ? both_high(word[v / 2]) : both_low(word[v / 2]); }
};

constexpr int bytes_of(Dtype t) { return t == Dtype::f32 ? 4 : 2; }
