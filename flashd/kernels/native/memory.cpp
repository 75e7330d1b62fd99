// The verb read_all.
#include "pool.hpp"
#include "verbs.hpp"

namespace flashd {

void bind_memory(nb::module_&) {}

}  // namespace flashd
