// One function per source file of bindings, called by module.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace dynapipe {

void bind_cut(nanobind::module_& module);
void bind_schedule(nanobind::module_& module);
void bind_verify(nanobind::module_& module);

}  // namespace dynapipe
