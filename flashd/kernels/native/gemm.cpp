// The verb gemm.
#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {

void bind_gemm(nb::module_&) {}

}  // namespace flashd
