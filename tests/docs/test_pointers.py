"""The tests that pages name as what holds a sentence are there, with the functions and rows that are named."""

import re

import pytest

from tests.docs.printed import PAGES, ROOT

POINTER = re.compile(r"`(?:(?P<file>[\w/]*test_\w+\.py)|…)(?:::(?P<name>test_\w+))?`(?:, \"(?P<row>[^\"]+)\")?")
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for glob in PAGES for path in sorted(ROOT.glob(glob))])
def test_tests_that_a_page_names_are_there(page):
    text = ""
    for pointer in POINTER.finditer((ROOT / page).read_text()):
        if pointer["file"]:
            whole = ROOT / pointer["file"]
            files = [whole] if whole in FILES else [path for path in FILES if path.match(pointer["file"])]
            assert len(files) == 1, f"{pointer[0]} is {files or 'nowhere'}"
            text = files[0].read_text()
        assert f"def {pointer['name'] or 'test_'}" in text and (pointer["row"] or "") in text, pointer[0]
