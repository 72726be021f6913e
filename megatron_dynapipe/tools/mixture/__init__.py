"""What a dataset is made from: a mixture file's tasks, their sources, and how rows become text."""
