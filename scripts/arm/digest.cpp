// Stores and gathers through the generic kernels, and prints a digest of the bytes for each pair of dtypes and scale.
// Built for two machines, the output must be the same (check.sh).

#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels.h"

using namespace portakv;

namespace {

constexpr int64_t kTokens = 512, kHeads = 2, kDim = 64, kRow = kHeads * kDim;
constexpr struct {
    DType dtype;
    int64_t bytes;
} kFormats[] = {{DType::f32, 4},    {DType::f16, 2},      {DType::bf16, 2}, {DType::e4m3fn, 1},
                {DType::e4m3fnuz, 1}, {DType::e5m2, 1}, {DType::e5m2fnuz, 1}};

// FNV-1a.
uint64_t digest(const std::vector<char>& bytes) {
    uint64_t hash = 14695981039346656037ull;
    for (unsigned char b : bytes) hash = (hash ^ b) * 1099511628211ull;
    return hash;
}

Rows rows(std::vector<char>& data, DType dtype, int64_t bytes) { return {data.data(), kRow * bytes, kDim * bytes, 0, 0, dtype}; }

void run(int src, int dst, float scale) {
    auto [src_type, src_bytes] = kFormats[src];
    auto [dst_type, dst_bytes] = kFormats[dst];
    std::vector<char> k(kTokens * kRow * src_bytes), back(k.size(), 0), cache((kTokens + 1) * kRow * dst_bytes, 0x55);
    for (int64_t i = 0; i < kTokens * kRow; ++i) {  // every 16-bit pattern; 32-bit ones from all over
        uint32_t bits = uint32_t(i) * (src_bytes == 4 ? 2654435761u : 1u);
        std::memcpy(&k[i * src_bytes], &bits, src_bytes);
    }
    std::vector<int64_t> loc(kTokens);
    for (int64_t i = 0; i < kTokens; ++i) loc[i] = i * 7 % kTokens + 1;
    loc[3] = -1, loc[9] = kTokens + 1, loc[11] = 0;  // skipped, counted, reserved
    float scales[kHeads] = {scale, scale};
    int64_t faults = 0;
    const float* used = dst_bytes == 1 ? scales : nullptr;
    Half in{rows(k, src_type, src_bytes), rows(cache, dst_type, dst_bytes), kHeads, kDim, used, 1};
    RowJob job{{reinterpret_cast<char*>(loc.data()), kTokens, 1, true}, 1, kTokens + 1, {in, in}, &faults, 2};
    kernels_generic.store(job);
    Half out{in.dst, rows(back, src_type, src_bytes), kHeads, kDim, used, 1};
    job.first = 0, job.half[0] = job.half[1] = out;
    kernels_generic.gather(job);
    std::printf("%d %d %g %016llx %016llx %lld\n", src, dst, scale, (unsigned long long)digest(cache),
                (unsigned long long)digest(back), (long long)faults);
}

}  // namespace

int main() {
    for (int src = 0; src < 3; ++src)
        for (int dst = 0; dst < 7; ++dst)
            for (float scale : {1.0f, 0.37f, 1e30f, 3e-30f}) run(src, dst, scale);
}
