// AVX2 + FMA + F16C: x86-64 since 2013.
#include "level.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <cpuid.h>
#include <immintrin.h>

namespace flashd {
namespace {

struct Vec {
    using F = __m256;
    static constexpr int64_t kWidth = 8;
    static constexpr int kBatchTile = 2;  // times 4 rows: 8 of 16 registers
    static constexpr int kPanelRows = 6;
    static constexpr int kPanelVectors = 2;

    static F zero() { return _mm256_setzero_ps(); }
    static F set(float value) { return _mm256_set1_ps(value); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

    static F load(const float* from) { return _mm256_loadu_ps(from); }
    static F load(const F16* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static F load(const BF16* from) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }

    static void store(float* to, F value) { _mm256_storeu_ps(to, value); }
    static void store(F16* to, F value) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }
    static void store(BF16* to, F value) {
        const __m256i bits = _mm256_castps_si256(value);
        const __m256i high = _mm256_srli_epi32(bits, 16);
        const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        const __m256i carry = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, carry), 16);
        const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
        const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, nan);
        const __m128i packed =
            _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
    }

    static float sum(F value) {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
};

#include "body.hpp"

bool supported() {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & bit_F16C);
}

}  // namespace

const Level* avx2_level() {
    static constexpr Level level = make_level("avx2", true);
    return supported() ? &level : nullptr;
}

}  // namespace flashd

#else

namespace flashd {
const Level* avx2_level() { return nullptr; }
}  // namespace flashd

#endif
