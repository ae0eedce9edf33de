// Output tiles for blocks that stay: whole tiles in turn, then the tiles that would leave a ragged last wave, cut along
// k into equal shares (`streams` of them), whose partial sums the last block of a tile adds in order of k.
#pragma once
#include "output.cuh"

// k steps [first, last) of output tile `id`; id < 0: nothing left.
struct Segment {
  int id, first, last;
};

struct Streams {
  int tiles, steps, waves, streams;

  // plan() keeps the products in 32 bits.
  DEVICE int share(u32 block, u32 units) const { return int(units * block / u32(streams)); }
  DEVICE int whole() const { return waves * gridDim.x; }
  DEVICE int units() const { return (tiles - whole()) * steps; }

  DEVICE Segment segment(int turn) const {
    if (turn < waves) return {int(turn * gridDim.x + blockIdx.x), 0, steps};
    if (blockIdx.x >= streams) return {-1, 0, 0};
    const int unit = share(blockIdx.x, units()), end = share(blockIdx.x + 1, units());
    const int tile = unit / steps + turn - waves;
    if (tile * steps >= end) return {-1, 0, 0};
    return {whole() + tile, max(0, unit - tile * steps), min(steps, end - tile * steps)};
  }

  // The blocks that share a tile, and the slot of a block's part: its first share goes to slot 2c, a later one to 2c + 1.
  DEVICE int owner(u32 unit) const { return int(((unit + 1) * streams - 1) / u32(units())); }
  DEVICE int slot(int block, int start) const { return 2 * block + (share(block, units()) < start); }
};
