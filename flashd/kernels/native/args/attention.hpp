// Attention over a KV cache.
#pragma once

#include "types.hpp"

namespace flashd {

struct AttentionArgs {
    const float* q;  // [tokens, heads, width]
    const void* k;   // [kv_heads, capacity, width]
    const void* v;
    Type type;
    int64_t tokens, heads, kv_heads, capacity, width, length;
    float scale;
    float* out;  // [tokens, heads, width]
};

// Query heads of one KV head that `attention` works on together; its scratch holds scores for so many.
constexpr int64_t kMaxHeadsAtOnce = 8;

struct AttentionVerbs {
    void (*attend)(const AttentionArgs&, int64_t first_head, int64_t last_head, float* scores);
};

}  // namespace flashd
