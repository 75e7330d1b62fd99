// CRC32C (Castagnoli) of many rows of one length. The instruction has a latency of three cycles and a
// throughput of one, so three rows are summed at a time.
#include <cstring>

#include "level.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#if defined(__clang__) && __clang_major__ >= 14
#define FLASHD_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define FLASHD_CRC_TARGET __attribute__((target("sse4.2")))
#endif
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define FLASHD_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace flashd {
namespace {

struct Tables {
    uint32_t value[8][256];
};

constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >> 1) ^ 0x82F63B78u : crc >> 1;
        tables.value[0][byte] = crc;
    }
    for (int t = 1; t < 8; ++t)
        for (uint32_t byte = 0; byte < 256; ++byte) {
            const uint32_t crc = tables.value[t - 1][byte];
            tables.value[t][byte] = tables.value[0][crc & 0xFF] ^ (crc >> 8);
        }
    return tables;
}

constexpr Tables kTables = make_tables();

inline uint64_t load64(const uint8_t* from) {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// Slicing by 8. Little-endian, as all processors that flashd builds for.
uint32_t table_row(const uint8_t* row, int64_t bytes) {
    uint32_t crc = ~0u;
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        uint64_t word = load64(row + i) ^ crc;
        crc = 0;
        for (int t = 7; t >= 0; --t, word >>= 8) crc ^= kTables.value[t][word & 0xFF];
    }
    for (; i < bytes; ++i) crc = kTables.value[0][(crc ^ row[i]) & 0xFF] ^ (crc >> 8);
    return ~crc;
}

#if defined(FLASHD_CRC_TARGET)

FLASHD_CRC_TARGET inline uint32_t step64(uint32_t crc, uint64_t word) {
#if defined(__x86_64__)
    return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
#else
    return __crc32cd(crc, word);
#endif
}

FLASHD_CRC_TARGET inline uint32_t step8(uint32_t crc, uint8_t byte) {
#if defined(__x86_64__)
    return _mm_crc32_u8(crc, byte);
#else
    return __crc32cb(crc, byte);
#endif
}

template <int kRows>
FLASHD_CRC_TARGET void hardware_rows(const uint8_t* const* rows, int64_t bytes, uint32_t* out) {
    uint32_t crc[kRows];
    for (int r = 0; r < kRows; ++r) crc[r] = ~0u;
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8)
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) crc[r] = step64(crc[r], load64(rows[r] + i));
    for (; i < bytes; ++i)
        for (int r = 0; r < kRows; ++r) crc[r] = step8(crc[r], rows[r][i]);
    for (int r = 0; r < kRows; ++r) out[r] = ~crc[r];
}

#endif

}  // namespace

bool has_crc32c_instruction() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2");
#elif defined(__aarch64__)
    return getauxval(AT_HWCAP) & (1u << 7);  // HWCAP_CRC32
#else
    return false;
#endif
}

void crc32c_rows(const uint8_t* rows, int64_t stride_bytes, const int64_t* index, int64_t first, int64_t last,
                 uint32_t* out, bool hardware) {
    const auto row = [&](int64_t j) { return rows + (index == nullptr ? j : index[j]) * stride_bytes; };
    int64_t r = first;
#if defined(FLASHD_CRC_TARGET)
    if (hardware) {
        for (; r + 3 <= last; r += 3) {
            const uint8_t* three[] = {row(r), row(r + 1), row(r + 2)};
            hardware_rows<3>(three, stride_bytes, out + r);
        }
        for (; r < last; ++r) {
            const uint8_t* one[] = {row(r)};
            hardware_rows<1>(one, stride_bytes, out + r);
        }
    }
#else
    (void)hardware;
#endif
    for (; r < last; ++r) out[r] = table_row(row(r), stride_bytes);
}

}  // namespace flashd
