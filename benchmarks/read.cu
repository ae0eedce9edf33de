// The speed of light for decode: reads every byte once, in 16-byte loads, and keeps only a checksum.
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* __restrict__ data, long long count, unsigned* out) {
    unsigned sum = 0;
    const long long step = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w)
                         : "l"(data + i + u * step));
        }
#pragma unroll
        for (int u = 0; u < 4; u++) sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    for (; i < count; i += step) sum += data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
    if (sum == 0x9e3779b9u) *out = sum;  // never true in practice: keeps the loads alive without a store
}
