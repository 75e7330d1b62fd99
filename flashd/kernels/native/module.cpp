// flashd.kernels._native: the verbs of flashd/kernels/twin, which documents them.
#include "verbs.hpp"

NB_MODULE(_native, module) {
    using namespace flashd;
    import_numpy();
    module.doc() = "Native kernels; flashd.kernels documents them.";
    bind_level(module);
    bind_gemv(module);
    bind_gemm(module);
    bind_ffn(module);
    bind_predict(module);
    bind_attention(module);
    bind_norms(module);
    bind_convert(module);
    bind_memory(module);
    bind_window(module);
}
