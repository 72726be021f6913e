"""Scripts that measure; `python -m benchmarks.FOLDER.SCRIPT` in the repository's root runs one."""
