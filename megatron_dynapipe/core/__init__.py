"""The idea, closed under its imports: plans, how they are made and proven, how a rank executes them."""
