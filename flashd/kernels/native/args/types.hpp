// Words that the arguments of all verbs share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashd {

enum class Type { f32, f16, bf16, u8, u32, i64, boolean };
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
