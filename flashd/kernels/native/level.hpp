// What every SIMD level implements: the verbs over a range of rows, columns or heads, on one thread.
//
// One source per level (simd_*.cpp) defines `Vec` and includes body.hpp, all inside an unnamed
// namespace: a symbol compiled for AVX-512 must never be the copy that the linker picks for all.
// For the same reason those sources use no templates of the standard library.
#pragma once

#include "args/attention.hpp"
#include "args/convert.hpp"
#include "args/norms.hpp"
#include "args/panels.hpp"
#include "args/rows.hpp"
#include "args/window.hpp"

namespace flashd {

struct Level {
    const char* name;
    bool hardware_crc;
    RowVerbs rows;
    PanelVerbs panels;
    AttentionVerbs attention;
    NormVerbs norms;
    ConvertVerbs convert;
    WindowVerbs window;
};

// Null where this build or this machine does not have the level.
const Level* avx512_level();
const Level* avx2_level();
const Level* neon_level();
const Level* portable_level();

// CRC32C of n rows; with instructions where the processor has them and `hardware` allows it.
// CRC32C of rows first..last-1 of `index` (null: of `rows`) into out[first..last-1].
void crc32c_rows(const uint8_t* rows, int64_t stride_bytes, const int64_t* index, int64_t first, int64_t last,
                 uint32_t* out, bool hardware);
bool has_crc32c_instruction();

}  // namespace flashd
