// The verbs as Python sees them: one source binds each, checks its arguments and shares it out to threads.
#pragma once

#include "arguments.hpp"
#include "level.hpp"

namespace flashd {

// What one thread takes at a time: some microseconds of memory traffic, so that a thread which lost
// its core to I/O holds up nobody for long.
constexpr int64_t kChunkBytes = 32 << 10;

const Level& level();                        // the SIMD level in use
int64_t chunk_of(int64_t bytes_per_item);  // items of a chunk, at least 1

// Prompts' parts of verbs whose arguments are checked: more than kMaxBatch tokens. Called without the GIL;
// std::bad_alloc if there is no memory for their scratch.
void ffn_dots_prompt(const DotsArgs& args);
void ffn_down_prompt(const DownArgs& args);
void attention_prompt(const AttentionArgs& args);

void bind_level(nb::module_& module);
void bind_gemv(nb::module_& module);
void bind_gemm(nb::module_& module);
void bind_ffn(nb::module_& module);
void bind_predict(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_norms(nb::module_& module);
void bind_convert(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_window(nb::module_& module);

}  // namespace flashd
