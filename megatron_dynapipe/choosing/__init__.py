"""What is chosen once for a run, by plans: layer splits, virtual stages, bounds of what any plan can reach."""
