// Attention of a prompt's tokens.
#include "panels.hpp"
#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {

void attention_prompt(const AttentionArgs& args) {
    const PanelVerbs& verbs = level().panels;
    const int workers = thread_count();
    const int64_t vectors = divide_up(args.tokens * (args.heads / args.kv_heads), verbs.width);
    const int64_t items = args.kv_heads * divide_up(vectors, verbs.vectors);
    const int64_t share = attention_scratch(args.width, verbs.width * verbs.vectors);
    const Scratch scratch(workers * share);
    const auto attend = [&](int64_t first, int64_t last, int worker) {
        verbs.attend(args, workers, first, last, scratch.data() + worker * share);
    };
    parallel_for(attend, items, 1, workers);
}

}  // namespace flashd
