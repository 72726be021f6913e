// megatron_dynapipe.planning._native: arrays in, arrays out.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, module) {
    module.doc() = "The planner's core in C++; every function has a pure Python twin in megatron_dynapipe.";
    dynapipe::bind_cut(module);
    dynapipe::bind_schedule(module);
    dynapipe::bind_verify(module);
}
