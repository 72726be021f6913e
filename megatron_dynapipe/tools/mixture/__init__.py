"""The sources of a dataset: a mixture file's tasks, their sources, and how rows become text."""
