"""The tuning benchmark runs, and its table has the published figures."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_choice_is_held_against_the_published_best_layout() -> None:
    argv = [sys.executable, "-m", "benchmarks.tuning.run", "published", "--models", "gpt", "--lengths", "512"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    row = [cell.strip() for cell in done.stdout.splitlines()[-1].strip("|").split("|")]
    assert row[:2] == ["GPT, 32 layers", "512"] and row[4] == "2·1·4"
    assert float(row[3]) / float(row[5]) < 0.95  # faster than the published best
    assert row[7] == row[4] and row[8] == "0.0%"
