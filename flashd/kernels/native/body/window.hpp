// What each neuron's row is worth, as a number whose order says which goes first.

inline int32_t key_of(int32_t value) { return value; }

// In the order of the numbers; NaN highest.
inline int32_t key_of(float value) {
    value += 0.0f;  // -0 becomes 0
    int32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    bits ^= (bits >> 31) & kKeyStays;  // of negative numbers, those with the larger bits are less
    return value == value ? bits : kKeyStays;
}

// Without branches, because nobody can foresee who has a row, and so that the compiler makes vectors of it. The
// keys of guesses and of what stays are taken from the ends: the two highest values are one, and so are the two
// least.
template <class T>
void fill_keys(const int32_t* __restrict row_of, const uint8_t* __restrict in_flight, const int32_t* __restrict last,
               int32_t step, const T* __restrict value, const uint8_t* __restrict guessed, int64_t n,
               int32_t* __restrict keys) {
    for (int64_t i = 0; i < n; ++i) {
        int32_t key = key_of(value[i]);
        key = key > kKeyGuessed + 1 ? key : kKeyGuessed + 1;
        key = key < kKeyStays - 1 ? key : kKeyStays - 1;
        key = guessed[i] ? kKeyGuessed : key;
        const int32_t stays = (row_of[i] < 0) | (last[i] == step) | (in_flight[i] != 0);
        keys[i] = stays ? kKeyStays : key;
    }
}

void find_least(const int32_t* __restrict keys, int64_t n, int32_t* __restrict least) {
    const int64_t whole = n / kKeyBlock;
    for (int64_t block = 0; block < whole; ++block) {
        int32_t value = kKeyStays;
        for (int64_t i = 0; i < kKeyBlock; ++i) {
            const int32_t key = keys[block * kKeyBlock + i];
            value = key < value ? key : value;
        }
        least[block] = value;
    }
    if (whole * kKeyBlock == n) return;
    least[whole] = kKeyStays;
    for (int64_t i = whole * kKeyBlock; i < n; ++i) least[whole] = keys[i] < least[whole] ? keys[i] : least[whole];
}

void row_keys(const RowKeysArgs& a) {
    if (a.type == Type::f32)
        fill_keys(a.row_of, a.in_flight, a.last, a.step, static_cast<const float*>(a.value), a.guessed, a.n, a.keys);
    else
        fill_keys(a.row_of, a.in_flight, a.last, a.step, static_cast<const int32_t*>(a.value), a.guessed, a.n, a.keys);
    find_least(a.keys, a.n, a.least);
}
