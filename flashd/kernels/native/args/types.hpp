// Words that the arguments of all verbs share.
#pragma once

#include <cstddef>
#include <cstdint>

// These headers are compiled once for each instruction set: a function that is not inlined would be one
// symbol of several kinds of code, and the linker could pick AVX-512 for all. It also keeps vectors that
// are passed in arrays in registers.
#define FLASHD_INLINE inline __attribute__((always_inline))

namespace flashd {

FLASHD_INLINE constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
FLASHD_INLINE constexpr int64_t round_up(int64_t a, int64_t unit) { return divide_up(a, unit) * unit; }

enum class Type { f32, f16, bf16, u8, u32, i32, i64, boolean };
enum class Activation { relu, relu2, silu, gelu, gelu_tanh };

// bfloat16 and float16 have one size; distinct types choose the right conversion.
struct F16 {
    uint16_t bits;
};
struct BF16 {
    uint16_t bits;
};

// Sequences that the memory-bound verbs compute together; more tokens are a prompt's and take the panels.
constexpr int64_t kMaxBatch = 16;

}  // namespace flashd
