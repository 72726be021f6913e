"""The page of a finished run: its records read, charts, text."""
