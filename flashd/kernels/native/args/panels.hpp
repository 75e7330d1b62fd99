// Compute-bound verbs: the many tokens of a prompt.
#pragma once

#include "types.hpp"

namespace flashd {

struct PanelVerbs {};

}  // namespace flashd
