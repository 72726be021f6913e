"""The vocabulary of plans: instructions, plans, their text, their bytes, and the verification that they can run."""
