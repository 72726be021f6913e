// What Python hands over: a batch's problem by name, and what both number.
#pragma once

#include "arrays.h"
#include "costs/problem.h"

namespace dynapipe {

// The problem from the arguments of BatchProblem (core/problem.py), checked.
Links links_of(Keywords& given);
Problem problem_of(Keywords given);

// What Python and the core both name and number; core/native.py compares them when it is imported.
nb::dict constants();

}  // namespace dynapipe
