// Any machine: one element at a time, or what the compiler makes of it.
#include "kernels.h"

#include "kernels.inl"

namespace slideformer {
const Kernels baseline_kernels = kernels_of<Scalar>("baseline");
}
