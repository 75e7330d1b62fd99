// What the verbs for the many tokens of a prompt share: scratch, and how a product is cut into items.
#pragma once

#include <memory>
#include <new>

#include "level.hpp"

namespace flashd {

// Floats that start a cache line: a vector of tokens never lies in two. std::bad_alloc if there is no memory.
class Scratch {
public:
    explicit Scratch(int64_t floats)
        : memory_(static_cast<float*>(operator new(static_cast<size_t>(floats) * sizeof(float), kLine))) {}

    float* data() const { return memory_.get(); }

    // Space for `floats` that keeps what follows aligned.
    static int64_t round_up(int64_t floats) { return (floats + 15) / 16 * 16; }

private:
    static constexpr std::align_val_t kLine{64};
    struct Free {
        void operator()(float* memory) const { operator delete(memory, kLine); }
    };

    std::unique_ptr<float[], Free> memory_;
};

// A plan for `workers` threads, at most `most_outputs` an item; nothing is packed yet.
PanelPlan panel_plan(const PanelVerbs& verbs, int64_t tokens, int64_t steps, int64_t outputs, int64_t most_outputs,
                     int workers);

// Floats that the packed tokens of a plan need.
int64_t packed_floats(const PanelPlan& plan);

// Pack with all threads; sets plan.packed to args.packed.
void panel_pack(const PanelVerbs& verbs, const PackArgs& args, PanelPlan& plan, int workers);

// Blocks of tokens, each of at most `most` vectors.
inline int64_t blocks_of(int64_t vectors, int64_t most) { return (vectors + most - 1) / most; }

}  // namespace flashd
