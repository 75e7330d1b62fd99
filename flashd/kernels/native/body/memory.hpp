// Reading memory at full speed, to know how fast that is.

// XOR of the 64-bit words [first, last) of memory that may be misaligned. One stream, eight vectors at
// a time; with narrow vectors the hardware's prefetchers alone stay behind.
uint64_t xor_words(const uint8_t* memory, int64_t first, int64_t last) {
    typedef uint64_t Lanes __attribute__((vector_size(4 * Vec::kWidth)));
    constexpr int64_t kLanes = W / 2;
    constexpr int64_t kStep = 8 * kLanes;
    constexpr int64_t kAheadBytes = 2048;
    Lanes acc[8] = {};
    int64_t i = first;
    for (; i + kStep <= last; i += kStep) {
        for (int64_t line = 0; line < kStep * 8; line += 64) __builtin_prefetch(memory + i * 8 + kAheadBytes + line);
#pragma GCC unroll 8
        for (int v = 0; v < 8; ++v) {
            Lanes loaded;
            __builtin_memcpy(&loaded, memory + (i + v * kLanes) * 8, sizeof loaded);
            acc[v] ^= loaded;
        }
    }
    uint64_t result = 0;
    for (; i < last; ++i) {
        uint64_t word;
        __builtin_memcpy(&word, memory + i * 8, sizeof word);
        result ^= word;
    }
    for (int v = 1; v < 8; ++v) acc[0] ^= acc[v];
    for (int lane = 0; lane < kLanes; ++lane) result ^= acc[0][lane];
    return result;
}
