// Joining the halves of divided backward passes that gain nothing.
#pragma once

#include "search/search.h"

namespace dynapipe {

// Joins every divided backward pass of a solution whose halves, run together, make its replica's time no longer, where
// passes are divided as far as that gains. Each one takes a simulation: with more than 350 rows on eight stages only
// the first ones of a stage are tried.
void join_halves(const Problem& problem, Found& found);

}  // namespace dynapipe
