// AVX-512 F, BW and VL.
#include "level.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <immintrin.h>

namespace flashd {
namespace {

struct Vec {
    using F = __m512;
    static constexpr int64_t kWidth = 16;
    static constexpr int kBatchTile = 4;
    static constexpr int kPanelRows = 6;
    static constexpr int kPanelVectors = 4;

    static F zero() { return _mm512_setzero_ps(); }
    static F set(float value) { return _mm512_set1_ps(value); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

    static F load(const float* from) { return _mm512_loadu_ps(from); }
    static F load(const F16* from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    static F load(const BF16* from) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }

    static void store(float* to, F value) { _mm512_storeu_ps(to, value); }
    static void store(F16* to, F value) {
        const __m256i bits = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
    }
    static void store(BF16* to, F value) {
        const __m512i bits = _mm512_castps_si512(value);
        const __m512i high = _mm512_srli_epi32(bits, 16);
        const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        const __m512i carry = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, carry), 16);
        const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        const __m512i chosen = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(chosen));
    }

    static float sum(F value) {
        const __m512 swapped = _mm512_shuffle_f32x4(value, value, 0x4E);
        const __m256 part = _mm512_castps512_ps256(_mm512_add_ps(value, swapped));
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(part), _mm256_extractf128_ps(part, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
};

#include "body.hpp"

}  // namespace

const Level* avx512_level() {
    static constexpr Level level = make_level("avx512", true);
    const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl");
    return supported ? &level : nullptr;
}

}  // namespace flashd

#else

namespace flashd {
const Level* avx512_level() { return nullptr; }
}  // namespace flashd

#endif
