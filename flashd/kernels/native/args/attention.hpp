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

// Positions that decoding works on at a time. Part of every result's bits: a softmax is put together from these.
constexpr int64_t kAttentionChunk = 256;

// What the chunks of the cache gave to every query row (a token's head), until they are put together.
struct AttentionParts {
    int64_t chunks;
    float* values;  // [tokens, heads, chunks, width] values weighted by exp(score - top)
    float* tops;    // [tokens, heads, chunks] the highest score
    float* sums;    // [tokens, heads, chunks] the sum of the weights
};

struct AttentionVerbs {
    // Items are (KV head, chunk) pairs, the chunk running faster.
    void (*attend)(const AttentionArgs&, const AttentionParts&, int64_t first_item, int64_t last_item);
    // Rows are (token, head) pairs.
    void (*combine)(const AttentionArgs&, const AttentionParts&, int64_t first_row, int64_t last_row);
};

}  // namespace flashd
