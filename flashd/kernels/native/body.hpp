// The verbs of one SIMD level, written over `Vec`. Included by simd_*.cpp inside an unnamed namespace.

#include "body/vector.hpp"

#include "body/dots.hpp"
#include "body/gemv.hpp"
#include "body/ffn.hpp"
#include "body/down.hpp"
#include "body/predict.hpp"
#include "body/memory.hpp"

#include "body/panel.hpp"
#include "body/gemm.hpp"
#include "body/ffn_prompt.hpp"
#include "body/attention_prompt.hpp"

#include "body/fold.hpp"
#include "body/attention.hpp"
#include "body/norms.hpp"
#include "body/convert.hpp"
#include "body/window.hpp"

#undef FLASHD_BY_TYPE
#undef FLASHD_INLINE

constexpr Level make_level(const char* name, bool hardware_crc) {
    return Level{
        name,
        hardware_crc,
        RowVerbs{W, pack_inputs, gemv, ffn_dots, ffn_down, predict_hidden, predict_scores, xor_words},
        PanelVerbs{W, Vec::kPanelVectors, panel_pack, gemm, panel_ffn_dots, panel_ffn_down, attention_prompt},
        AttentionVerbs{attend, combine},
        NormVerbs{rmsnorm, layernorm, rope},
        ConvertVerbs{to_f32, from_f32},
        WindowVerbs{row_keys},
    };
}
