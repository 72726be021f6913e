// The class BatchProblem of megatron_dynapipe.core._native.
#pragma once

#include <nanobind/nanobind.h>

namespace dynapipe {

void bind_batch_problem(nanobind::module_& module);

}  // namespace dynapipe
