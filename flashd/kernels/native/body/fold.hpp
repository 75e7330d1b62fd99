// Sums over the lanes of many vectors at once.
//
// A lone sum over 16 lanes takes some ten instructions one after the other; sixteen of them together take
// three each. Lane i is added to lane i + 8, then i + 4, i + 2, i + 1.

constexpr int64_t kPositions = 4;  // of a tile of scores: what the last two steps make a vector of

#if defined(__clang__)
#define FLASHD_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FLASHD_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (typename Lanes<kLanes>::U{__VA_ARGS__}))
#endif

// Depends on a template parameter, so that only this level's width has to be valid.
template <int64_t kLanes>
struct Lanes {
    typedef uint32_t U __attribute__((vector_size(kLanes * 4)));
    typedef float F __attribute__((vector_size(kLanes * 4)));
};

// Halves the distance of what is still to be added: what a blend leaves in place plus what one shuffle
// brings to it. Below, [a b] are parts of a vector.

// kLanes / 4 vectors to four lanes of each, one after the other.
template <int64_t kLanes>
FLASHD_INLINE typename Lanes<kLanes>::F fold_to_four(const typename Lanes<kLanes>::F* a) {
    if constexpr (kLanes == 16) {
        const auto x = FLASHD_SHUFFLE(a[0], a[2], 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) +
                       FLASHD_SHUFFLE(a[0], a[2], 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
        const auto y = FLASHD_SHUFFLE(a[1], a[3], 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) +
                       FLASHD_SHUFFLE(a[1], a[3], 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
        return FLASHD_SHUFFLE(x, y, 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31) +
               FLASHD_SHUFFLE(x, y, 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    } else if constexpr (kLanes == 8) {
        return FLASHD_SHUFFLE(a[0], a[1], 0, 1, 2, 3, 12, 13, 14, 15) +
               FLASHD_SHUFFLE(a[0], a[1], 4, 5, 6, 7, 8, 9, 10, 11);
    } else {
        static_assert(kLanes == 4, "vectors have 4, 8 or 16 lanes");
        return a[0];
    }
}

// Per four lanes: [a a a a] and [b b b b] to [a a b b].
template <int64_t kLanes>
FLASHD_INLINE typename Lanes<kLanes>::F fold_to_two(typename Lanes<kLanes>::F a, typename Lanes<kLanes>::F b) {
    if constexpr (kLanes == 16)
        return FLASHD_SHUFFLE(a, b, 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31) +
               FLASHD_SHUFFLE(a, b, 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
    else if constexpr (kLanes == 8)
        return FLASHD_SHUFFLE(a, b, 0, 1, 10, 11, 4, 5, 14, 15) + FLASHD_SHUFFLE(a, b, 2, 3, 8, 9, 6, 7, 12, 13);
    else
        return FLASHD_SHUFFLE(a, b, 0, 1, 6, 7) + FLASHD_SHUFFLE(a, b, 2, 3, 4, 5);
}

// Per four lanes: [a a b b] and [c c d d] to [a b c d].
template <int64_t kLanes>
FLASHD_INLINE typename Lanes<kLanes>::F fold_to_one(typename Lanes<kLanes>::F a, typename Lanes<kLanes>::F b) {
    if constexpr (kLanes == 16)
        return FLASHD_SHUFFLE(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
               FLASHD_SHUFFLE(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    else if constexpr (kLanes == 8)
        return FLASHD_SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + FLASHD_SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
    else
        return FLASHD_SHUFFLE(a, b, 0, 2, 4, 6) + FLASHD_SHUFFLE(a, b, 1, 3, 5, 7);
}

#undef FLASHD_SHUFFLE

// Sums of 4 positions' accumulators for W / 4 rows: lane 4 * row + position.
FLASHD_INLINE Vec::F fold_tile(const Vec::F (*acc)[W / 4]) {
    using F = Lanes<W>::F;
    F fours[kPositions];
#pragma GCC unroll 4
    for (int p = 0; p < kPositions; ++p) {
        F rows[W / 4];
#pragma GCC unroll 4
        for (int r = 0; r < W / 4; ++r) rows[r] = reinterpret_cast<F>(acc[p][r]);
        fours[p] = fold_to_four<W>(rows);
    }
    const F low = fold_to_two<W>(fours[0], fours[1]), high = fold_to_two<W>(fours[2], fours[3]);
    return reinterpret_cast<Vec::F>(fold_to_one<W>(low, high));
}
