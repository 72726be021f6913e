"""Prints what this project requires, line by line, with the extras that are named and without the packages left out.

python scripts/list_requirements.py --without torch train data
"""

import argparse
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def requirements(extras: list[str], without: list[str]) -> list[str]:
    """The requirements of pyproject.toml, each once, in its order."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    listed = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    return [each for each in dict.fromkeys(listed) if Requirement(each).name not in without]


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="train, data, plots or dev")
    parser.add_argument("--without", action="append", default=[], metavar="PACKAGE")
    args = parser.parse_args()
    print("\n".join(requirements(args.extras, args.without)))


if __name__ == "__main__":
    main()
