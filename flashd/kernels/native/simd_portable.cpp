// C++ for every processor: four lanes in the vector types of GCC and Clang, which become SSE2 on x86-64.
// Multiplication and addition round separately here (the build says -ffp-contract=off).
#include "level.hpp"

namespace flashd {
namespace {

using Floats = float __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));
using Halves = uint16_t __attribute__((vector_size(8)));

inline Floats as_floats(Words bits) { return reinterpret_cast<Floats>(bits); }
inline Words as_words(Floats value) { return reinterpret_cast<Words>(value); }
// A comparison gives all ones or all zeros in every lane.
inline Words choose(Words mask, Words yes, Words no) { return (mask & yes) | (~mask & no); }

// Branch-free conversions between binary16 and binary32 (method: Maratyszcza, FP16, MIT).
inline Floats from_half(Words half) {
    const Words word = half << 16;
    const Words twice = word + word;
    const Floats normal = as_floats((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
    const Floats subnormal = as_floats((twice >> 17) | (126u << 23)) - 0.5f;
    const Words small = reinterpret_cast<Words>(twice < (1u << 27));
    return as_floats((word & 0x80000000u) | choose(small, as_words(subnormal), as_words(normal)));
}

inline Words to_half(Floats value) {
    const Words word = as_words(value);
    const Words twice = word + word;
    const Words exponent = twice & 0xFF000000u;
    const Words small = reinterpret_cast<Words>(exponent < 0x71000000u);
    const Words bias = choose(small, Words{} + 0x71000000u, exponent);
    // The first factor sends what is too large to infinity; adding the bias rounds to even.
    const Floats scaled = (as_floats(word & 0x7FFFFFFFu) * 0x1.0p+112f) * 0x1.0p-110f;
    const Words bits = as_words(as_floats((bias >> 1) + 0x07800000u) + scaled);
    const Words magnitude = ((bits >> 13) & 0x7C00u) + (bits & 0xFFFu);
    const Words nan = reinterpret_cast<Words>(twice > 0xFF000000u);
    return ((word >> 16) & 0x8000u) | choose(nan, Words{} + 0x7E00u, magnitude);
}

inline Words to_bfloat(Floats value) {
    const Words bits = as_words(value);
    const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const Words nan = reinterpret_cast<Words>((bits & 0x7FFFFFFFu) > 0x7F800000u);
    return choose(nan, (bits >> 16) | 0x40u, rounded);
}

struct Vec {
    using F = Floats;
    static constexpr int64_t kWidth = 4;
    static constexpr int kBatchTile = 2;
    static constexpr int kPanelRows = 6;
    static constexpr int kPanelVectors = 2;

    static F zero() { return F{}; }
    static F set(float value) { return F{value, value, value, value}; }
    static F add(F a, F b) { return a + b; }
    static F fma(F a, F b, F c) { return a * b + c; }

    static Words words(const uint16_t* from) {
        Halves halves;
        __builtin_memcpy(&halves, from, sizeof halves);
        return __builtin_convertvector(halves, Words);
    }
    static F load(const float* from) {
        F value;
        __builtin_memcpy(&value, from, sizeof value);
        return value;
    }
    static F load(const F16* from) { return from_half(words(&from->bits)); }
    static F load(const BF16* from) { return as_floats(words(&from->bits) << 16); }

    static void store(float* to, F value) { __builtin_memcpy(to, &value, sizeof value); }
    static void store(F16* to, F value) { store_halves(to, to_half(value)); }
    static void store(BF16* to, F value) { store_halves(to, to_bfloat(value)); }
    static void store_halves(void* to, Words value) {
        const Halves halves = __builtin_convertvector(value, Halves);
        __builtin_memcpy(to, &halves, sizeof halves);
    }

    static float sum(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }
};

#include "body.hpp"

}  // namespace

const Level* portable_level() {
    static constexpr Level level = make_level("portable", false);
    return &level;
}

}  // namespace flashd
