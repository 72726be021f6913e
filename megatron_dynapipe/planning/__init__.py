"""From a global batch to a verified plan: ordering, partition, balance, schedule, simulation, lowering."""
