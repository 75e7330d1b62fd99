// RMSNorm, LayerNorm and rotary position embeddings.
#pragma once

#include "types.hpp"

namespace flashd {

struct NormArgs {
    const float* x;       // [tokens, d]
    const float* weight;  // [d]
    const float* bias;    // [d] or null
    float* out;           // [tokens, d], perhaps x itself
    int64_t d;
    double eps;
};

struct RopeArgs {
    float* x;          // [tokens, heads, width]
    const float* cos;  // [tokens, width / 2]
    const float* sin;
    int64_t heads, width;
};

struct NormVerbs {
    void (*rmsnorm)(const NormArgs&, int64_t first_token, int64_t last_token);
    void (*layernorm)(const NormArgs&, int64_t first_token, int64_t last_token);
    void (*rope)(const RopeArgs&, int64_t first_token, int64_t last_token);
};

}  // namespace flashd
