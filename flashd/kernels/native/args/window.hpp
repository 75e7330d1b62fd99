// Arguments of the verbs on tables of rows.
#pragma once

#include "types.hpp"

namespace flashd {

// Keys of neurons whose rows stay, and of rows that only a guess has asked for.
constexpr int32_t kKeyStays = INT32_MAX, kKeyGuessed = INT32_MIN;
constexpr int64_t kKeyBlock = 16;  // keys that have their least one noted

struct RowKeysArgs {
    const int32_t* row_of;
    const uint8_t* in_flight;
    const int32_t* last;
    int32_t step;
    const void* value;  // float32 or int32
    Type type;
    const uint8_t* guessed;
    int64_t n;
    int32_t* keys;   // [n]
    int32_t* least;  // [blocks]
};

struct WindowVerbs {
    void (*row_keys)(const RowKeysArgs&);
};

}  // namespace flashd
