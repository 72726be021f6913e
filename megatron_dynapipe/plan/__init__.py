"""The vocabulary a plan is written in: instructions, plans, their text, their bytes and the proof that they can run."""
