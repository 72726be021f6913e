"""Numbers and pictures of plans and runs."""

from pathlib import Path

REPORT_FOLDER = Path("dynapipe-report")
"""Where records and pictures go if no other folder is given."""
COST_FILE = "cost-model.json"
"""In the folder of records: the costs that were measured for the run."""
