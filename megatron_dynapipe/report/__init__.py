"""Numbers and pictures of plans and runs."""
