// Stores, gathers and reads through the generic kernels, and prints a digest of the bytes for each pair of dtypes and
// scale, for FlashMLA and rope, for each packed layout, and for each kind of read.
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

struct alignas(64) Line {
    char bytes[64];
};

// FNV-1a.
template <class T>
uint64_t digest(const std::vector<T>& data) {
    uint64_t hash = 14695981039346656037ull;
    auto* bytes = reinterpret_cast<const unsigned char*>(data.data());
    for (size_t i = 0; i < data.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
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

// FlashMLA's pages (`block` 64) and rows, with the rope part rotated or not, and rotated rows where `block` is 0.
void run_rope(int src, int64_t block, int64_t angles, bool pairs) {
    auto [type, bytes] = kFormats[src];
    const int64_t dim = block ? 2 * block : kDim, values = block == 64 ? dim + 2 * kDim : dim + dim / 32;
    const int64_t packed[2] = {block ? values : kRow * bytes, block == 64 ? dim / 64 + 1 : block ? 2 * kDim : kRow * bytes};
    std::vector<char> x(kTokens * kRow * 2 * bytes), back(2 * x.size(), 0), caches[2];
    for (int64_t i = 0; i < int64_t(x.size()) / bytes; ++i) {
        uint32_t bits = uint32_t(i) * (bytes == 4 ? 2654435761u : 40503u);
        std::memcpy(&x[i * bytes], &bits, bytes);
    }
    std::vector<float> table(64 * kDim);
    for (size_t i = 0; i < table.size(); ++i) table[i] = float(int(i * 2654435761u >> 8 & 0xFFFF) - 32768) / 32768;
    std::vector<int64_t> loc(kTokens), positions(kTokens);
    for (int64_t i = 0; i < kTokens; ++i) loc[i] = i * 7 % kTokens + 1, positions[i] = i * 5 % 66 - 1;
    std::vector<char> scratch(2 * 4096);
    int64_t faults = 0, heads = block ? 1 : kHeads;
    RowJob job{{reinterpret_cast<char*>(loc.data()), kTokens, 1, true}, 1, kTokens + 1, {}, &faults, 2, block, {}};
    for (int h = 0; h < 2; ++h) {
        caches[h].assign(size_t((kTokens + 1) * packed[h]), 0x55);
        int64_t n = h ? kDim : dim, row = heads * n * bytes;
        DType kept = block ? DType::e4m3fn : type;
        job.half[h] = {{x.data(), row, n * bytes, 0, 0, type}, {caches[h].data(), packed[h], kDim * bytes, 0, 0, kept},
                       heads, n, nullptr, 0};
    }
    job.rope = {reinterpret_cast<char*>(table.data()), DType::f32, kDim * 4, 64,
                {reinterpret_cast<char*>(positions.data()), kTokens, 1, true}, angles, pairs, block != 0,
                scratch.data(), 4096};
    (block ? angles ? kernels_generic.store_rope_flashmla : kernels_generic.store_flashmla : kernels_generic.store_rope)(job);
    std::printf("rope %d %d %d %d %016llx %016llx", src, int(block), int(angles), pairs, (unsigned long long)digest(caches[0]),
                (unsigned long long)digest(caches[1]));
    if (block) {
        for (Half& half : job.half) half = {half.dst, {back.data(), half.dim * bytes, 0, 0, 0, type}, 1, half.dim, nullptr, 0};
        job.half[1].dst.data += kTokens * dim * bytes;
        kernels_generic.gather_flashmla(job);
    }
    std::printf(" %016llx %lld\n", (unsigned long long)digest(back), (long long)faults);
}

// Packed pages, in every unit and width that there is, `shift` bytes after the beginning of a line: tiles whole, with
// whole and half lines, with gaps and all but empty, whose slots are in some order.
void run_packed(int src, int dst, int64_t page, Packing k, Packing v, int64_t shift) {
    constexpr int64_t kPages = 8;
    auto [src_type, src_bytes] = kFormats[src];
    auto [dst_type, dst_bytes] = kFormats[dst];
    std::vector<char> x(kPages * page * kRow * src_bytes), back(x.size(), 0);
    std::vector<Line> caches[2];
    for (auto& cache : caches) cache.resize(kPages * page * kRow * dst_bytes / sizeof(Line) + 1);
    for (size_t i = 0; i < x.size(); ++i) x[i] = char(i * 2654435761u >> 13);
    int64_t tile = k.width == 16 ? 16 : page % 64 ? 32 : 64;
    std::vector<Pick> picks;
    std::vector<int64_t> starts;
    for (int64_t slot = page; slot < kPages * page; slot += tile) {
        constexpr struct {
            int64_t every, eighths;
        } kKinds[] = {{1, 8}, {1, 4}, {1, 5}, {1, 6}, {2, 8}, {5, 8}, {13, 8}};
        auto [every, eighths] = kKinds[slot / tile % 7];
        int64_t n = tile * eighths / 8;
        starts.push_back(int64_t(picks.size()));
        for (int64_t i = 0; i < n; i += every) picks.push_back({slot + i * 7 % n, int64_t(picks.size())});
    }
    starts.push_back(int64_t(picks.size()));
    PackedJob job{picks.data(), starts.data(), int64_t(starts.size()) - 1, tile, {}, {k, v}, shift != 0, 2};
    const float scales[kHeads] = {0.37f, 1.0f};
    Rows plain = rows(x, src_type, src_bytes), out = rows(back, src_type, src_bytes);
    for (int h = 0; h < 2; ++h) {
        char* data = reinterpret_cast<char*>(caches[h].data()) + shift;
        Rows pages{data, 0, page * kDim * dst_bytes, page, kHeads * page * kDim * dst_bytes, dst_type};
        job.half[h] = {plain, pages, kHeads, kDim, dst_bytes == 1 ? scales : nullptr, 1};
    }
    kernels_generic.store_packed(job);
    std::printf("packed %d %d %d %d %016llx %016llx", src, dst, int(k.width), int(shift),
                (unsigned long long)digest(caches[0]), (unsigned long long)digest(caches[1]));
    for (Half& half : job.half) half = {half.dst, out, kHeads, kDim, half.scale, 1};
    kernels_generic.gather_packed(job);
    std::printf(" %016llx\n", (unsigned long long)digest(back));
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
    for (int64_t shift : {0, 4}) {
        for (int src : {0, 2}) run_packed(src, 2, 96, {4, 16, kDim / 2}, {2, 2, 16}, shift);
        for (int src : {0, 2, 3})
            for (int dst : {0, 2, 3})
                for (int64_t page : {64, 96, 128})
                    if (src == 0 || src == dst)
                        run_packed(src, dst, page, {kFormats[dst].bytes, page, kDim}, {kFormats[dst].bytes, 1, kDim}, shift);
    }
    for (int src = 0; src < 3; ++src)
        for (int64_t block : {0, 64, 128})
            for (int64_t angles : {0, 16, 64})
                for (bool pairs : {false, true})
                    if (block || angles) run_rope(src, block, angles, pairs);
    for (int which = 0; which < 8; ++which)
        for (int64_t step : {1, 3, 4}) run_read(which & 1, which & 2, which & 4, step);
}
