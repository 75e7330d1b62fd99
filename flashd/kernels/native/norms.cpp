// The verbs rmsnorm, layernorm and rope.
#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {

void bind_norms(nb::module_&) {}

}  // namespace flashd
