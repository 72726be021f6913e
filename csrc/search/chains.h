// Pieces of samples in a solution. The pieces of a sample go up through the micro-batches of one replica, so that each
// finds the keys and values of those before it, and backward passes go down, so that each finds their gradients:
//
//     forward    A  s0 s1 s2  B          pieces s0, s1, s2 of one sample, each in a micro-batch of its own
//     backward   A  s2 s1 s0  B
//
// Micro-batches that hold pieces of one sample, directly or through others, are a bundle. Backward passes run in the
// order of forward passes, a bundle's in reverse among its places.
#pragma once

#include <cstdint>
#include <vector>

#include "costs/problem.h"
#include "search/batches.h"

namespace dynapipe {

class Chains {
public:
    explicit Chains(const Problem& problem);

    // Whether every chain's pieces are all there and ascend.
    bool hold(const MicroBatches& batches);

    // Which micro-batch each place of the backward sequence runs: [micro-batches]; empty where that is the place
    // itself.
    const std::vector<int32_t>& turned(const MicroBatches& batches);

    // The places of the bundle that a micro-batch is in, ascending.
    std::vector<size_t> bundle(const MicroBatches& batches, size_t at);

    // Runs of micro-batches, each a bundle in the order given, or a single one.
    std::vector<MicroBatches> blocks(const MicroBatches& batches);

private:
    void unite(const MicroBatches& batches);
    int32_t root(int32_t at);

    const Problem& problem_;
    std::vector<int32_t> first_, count_;             // [chains] of the pieces
    std::vector<int32_t> parent_, of_chain_, seen_;  // [micro-batches], [chains], [chains]
    std::vector<int32_t> turned_, last_, before_;    // [micro-batches]
};

}  // namespace dynapipe
