// RMSNorm, LayerNorm and rotary position embeddings.
#pragma once

#include "types.hpp"

namespace flashd {

struct NormVerbs {};

}  // namespace flashd
