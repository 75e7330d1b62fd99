// What every SIMD level implements: the verbs over a range of rows, columns or heads, on one thread.
//
// One source per level (simd_*.cpp) defines `Vec` and includes body.hpp, all inside an unnamed
// namespace: a symbol compiled for AVX-512 must never be the copy that the linker picks for all.
// For the same reason those sources use no templates of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashd {

enum class Type { f32, f16, bf16, u8, u32 };
enum class Activation { relu, silu, gelu, gelu_tanh };

// bfloat16 and float16 have one size; distinct types choose the right conversion.
struct F16 {
    uint16_t bits;
};
struct BF16 {
    uint16_t bits;
};

struct GemvArgs {
    const void* w;  // [n, k]
    Type type;
    const float* x;     // [batch, k]
    float* out;         // [batch, n]
    const float* bias;  // [n] or null
    int64_t n, k, batch;
};

struct RowArgs {
    const uint8_t* rows;  // n rows of [up | gate | down], stride_bytes apart
    Type type;
    int64_t n, stride_bytes, d;
    bool gated;
    int64_t batch;
};

struct DotsArgs : RowArgs {
    Activation activation;
    const float* x;          // [batch, d]
    float* out;              // [batch, n]
    const float* up_bias;    // [n] or null
    const float* gate_bias;  // [n] or null
};

struct DownArgs : RowArgs {
    const float* h;  // [batch, n]
    float* acc;      // [batch, d]
};

struct AttentionArgs {
    const float* q;  // [heads, width]
    const void* k;   // [kv_heads, capacity, width]
    const void* v;
    Type type;
    int64_t heads, kv_heads, capacity, width, length;
    float scale;
    float* out;  // [heads, width]
};

// Query heads of one KV head that `attention` works on together; its scratch holds scores for so many.
constexpr int64_t kMaxHeadsAtOnce = 8;

struct ConvertArgs {
    const void* from;
    void* to;
    Type type;  // of the side that is not float32
};

struct Level {
    const char* name;
    bool hardware_crc;
    void (*gemv)(const GemvArgs&, int64_t first_row, int64_t last_row);
    void (*ffn_dots)(const DotsArgs&, int64_t first_row, int64_t last_row);
    void (*ffn_down)(const DownArgs&, int64_t first_column, int64_t last_column);
    void (*attention)(const AttentionArgs&, int64_t first_head, int64_t last_head, float* scores);
    void (*to_f32)(const ConvertArgs&, int64_t first, int64_t last);
    void (*from_f32)(const ConvertArgs&, int64_t first, int64_t last);
};

// Null where this build or this machine does not have the level.
const Level* avx512_level();
const Level* avx2_level();
const Level* neon_level();
const Level* portable_level();

// CRC32C of n rows; with instructions where the processor has them and `hardware` allows it.
void crc32c_rows(const uint8_t* rows, int64_t stride_bytes, int64_t n, uint32_t* out, bool hardware);
bool has_crc32c_instruction();

}  // namespace flashd
