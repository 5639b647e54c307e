"""The examples of docs/index.md, docs/errors.md and the pages for users of other systems print what is stated."""

from pathlib import Path

import pytest

from tests.docs.pages import blocks, fleet_of, printed, start, stated

pytestmark = pytest.mark.slow

# Each page, and how many lines its programs print.
PAGES = {"index.md": 1, "errors.md": 16, "from-celery.md": 4, "from-ray.md": 4, "from-triton.md": 4, "from-slurm.md": 4}


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_the_page_print_what_it_states(tmp_path: Path, page: str) -> None:
    handlers, *programs = blocks(page)
    assert sum(len(stated(program)) for program in programs) == PAGES[page]
    with fleet_of(tmp_path, handlers) as fleet:
        start(fleet)
        for program in programs:
            assert printed(fleet, program, tmp_path) == stated(program)
        assert not fleet.faults()
