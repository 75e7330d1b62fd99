// Conversions between float32 and the weight types.
#pragma once

#include "types.hpp"

namespace flashd {

struct ConvertArgs {
    const void* from;
    void* to;
    Type type;  // of the side that is not float32
};

struct ConvertVerbs {
    void (*to_f32)(const ConvertArgs&, int64_t first, int64_t last);
    void (*from_f32)(const ConvertArgs&, int64_t first, int64_t last);
};

}  // namespace flashd
