// Stores, gathers and reads through the generic kernels, and prints a digest of the bytes for each pair of dtypes and
// scale, and for each kind of read.
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

// Slots on both sides of every bound, in int32 and int64, to both widths.
void run_read(bool table_wide, bool out_wide, bool mapped, int64_t step) {
    constexpr int64_t kSlots = 5000, kColumns = 3000;
    std::vector<int64_t> mapping(kSlots + 1), wide(2 * kColumns);
    std::vector<int32_t> narrow(wide.size());
    for (int64_t i = 0; i <= kSlots; ++i) mapping[i] = i % 7 ? i * 3 : i % 2 ? 0 : int64_t(1) << 40;
    for (size_t i = 0; i < wide.size(); ++i) narrow[i] = int32_t(wide[i] = int64_t(i) * 11 % (kSlots + 40) - 20);
    ReadLine lines[] = {{0, 900, 0, 0}, {kColumns, 2, 1000, 1000}, {7, 600, 1002, 1002}, {0, 0, 1602, 1602}};
    std::vector<char> out(2000 * 8, 0x55);
    int64_t faults[2] = {0, 0};
    const char* table = table_wide ? reinterpret_cast<char*>(wide.data()) : reinterpret_cast<char*>(narrow.data());
    ReadJob job{mapped ? mapping.data() : nullptr, kSlots, table, table_wide, out.data(), out_wide, 1990,
                lines, 4, step, -1, &faults[0], &faults[1], 2};
    kernels_generic.read(job);
    std::printf("read %d %d %d %d %016llx %lld %lld\n", table_wide, out_wide, mapped, int(step),
                (unsigned long long)digest(out), (long long)faults[0], (long long)faults[1]);
}

}  // namespace

int main() {
    for (int src = 0; src < 3; ++src)
        for (int dst = 0; dst < 7; ++dst)
            for (float scale : {1.0f, 0.37f, 1e30f, 3e-30f}) run(src, dst, scale);
    for (int which = 0; which < 8; ++which)
        for (int64_t step : {1, 3, 4}) run_read(which & 1, which & 2, which & 4, step);
}
