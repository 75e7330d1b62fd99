// NEON: every 64-bit ARM processor.
#include "level.hpp"

#if defined(__aarch64__)

#include <arm_neon.h>

namespace flashd {
namespace {

struct Vec {
    using F = float32x4_t;
    static constexpr int64_t kWidth = 4;
    static constexpr int kBatchTile = 4;
    static constexpr int kPanelRows = 6;
    static constexpr int kPanelVectors = 4;

    static F zero() { return vdupq_n_f32(0.0f); }
    static F set(float value) { return vdupq_n_f32(value); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }

    static F load(const float* from) { return vld1q_f32(from); }
    static F load(const F16* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))); }
    static F load(const BF16* from) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&from->bits), 16)); }

    static void store(float* to, F value) { vst1q_f32(to, value); }
    static void store(F16* to, F value) { vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(value))); }
    static void store(BF16* to, F value) {
        const uint32x4_t bits = vreinterpretq_u32_f32(value);
        const uint32x4_t high = vshrq_n_u32(bits, 16);
        const uint32x4_t carry = vaddq_u32(vandq_u32(high, vdupq_n_u32(1)), vdupq_n_u32(0x7FFF));
        const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, carry), 16);
        const uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));
        vst1_u16(&to->bits, vmovn_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet)));
    }

    static float sum(F value) { return vaddvq_f32(value); }
};

#include "body.hpp"

}  // namespace

const Level* neon_level() {
    static constexpr Level level = make_level("neon", true);
    return &level;
}

}  // namespace flashd

#else

namespace flashd {
const Level* neon_level() { return nullptr; }
}  // namespace flashd

#endif
