"""Numbers and pictures of plans and runs."""

from pathlib import Path

REPORT_FOLDER = Path("dynapipe-report")
"""Where records and pictures go if no other folder is given."""
