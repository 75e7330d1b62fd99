// The verbs predict and topk_union.
#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {

void bind_predict(nb::module_&) {}

}  // namespace flashd
