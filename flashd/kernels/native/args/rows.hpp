// Memory-bound verbs: each weight is read once and used for up to 16 sequences, whose inputs lie packed.
#pragma once

#include "types.hpp"

namespace flashd {

// Rows whose dot products are computed together.
constexpr int64_t kRowTile = 4;

struct GemvArgs {
    const void* w;  // [n, k]
    Type type;
    const float* x;     // [batch, k], packed
    float* out;         // [batch, n]
    const float* bias;  // [n] or null
    int64_t n, k, batch;
};

struct RowArgs {
    const uint8_t* rows;   // [n] rows of [up | gate | down], stride_bytes apart
    Type type;
    int64_t n, stride_bytes, d;
    bool gated;
    int64_t batch;         // sequences, or tokens of a prompt
    const int64_t* index;  // [count] row numbers, or null: row j is j
    int64_t count;         // rows listed
};

struct DotsArgs : RowArgs {
    Activation activation;
    float threshold;
    const float* x;          // [batch, d]; packed for RowVerbs
    float* out;              // [batch, columns]
    const int64_t* slots;    // [count] columns of out, or null: column i is i
    const uint8_t* mask;     // [batch, columns] or null; any value but 0 is true
    int64_t columns;
    const float* up_bias;    // [n] or null
    const float* gate_bias;  // [n] or null
};

struct DownArgs : RowArgs {  // count == columns of h
    const float* h;  // [batch, count]
    float* acc;      // [batch, d]
};

struct PredictArgs {
    const void* w1;  // [rank, d]
    const void* w2;  // [n, rank]
    Type type1, type2;
    int64_t batch, d, rank, n;
    const float* x;   // [batch, d], packed
    const float* b1;  // [rank] or null
    const float* b2;  // [n] or null
    float threshold;
    float* hidden;    // [batch, rank], packed, zeros at first
    float* scores;    // [batch, n] or null
    uint8_t* active;  // [batch, n]
};

struct RowVerbs {
    // Packed inputs are [k / width, batch, width], zeros behind each end; of one sequence whose k is a
    // multiple of the width they are the same as before.
    int64_t width;
    void (*pack_inputs)(const float* x, int64_t k, int64_t batch, float* packed);
    void (*gemv)(const GemvArgs&, int64_t first_row, int64_t last_row);
    void (*ffn_dots)(const DotsArgs&, int64_t first_listed, int64_t last_listed);
    void (*ffn_down)(const DownArgs&, int64_t first_column, int64_t last_column);
    void (*predict_hidden)(const PredictArgs&, int64_t first_row, int64_t last_row);
    void (*predict_scores)(const PredictArgs&, int64_t first_row, int64_t last_row);
    uint64_t (*xor_words)(const uint8_t* memory, int64_t first_word, int64_t last_word);
};

}  // namespace flashd
