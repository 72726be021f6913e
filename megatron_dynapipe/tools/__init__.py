"""Tools that are built on the core and not needed to train: preparing data, tuning, comparing, converting, reports."""
