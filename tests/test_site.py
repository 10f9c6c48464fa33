"""The documentation as a site: links lead somewhere, the steps that pages show are there, Sphinx has no warning."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def maker():
    pytest.importorskip("griffe", reason="the site needs griffe: make setup")
    sys.path.insert(0, str(ROOT / "docs"))  # as for a script of that folder
    spec = importlib.util.spec_from_file_location("make_site", ROOT / "docs" / "make_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gathered(maker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    maker.gather(folder)
    return folder


def test_the_site_is_gathered_whole(maker, gathered):
    pages = [path for path in gathered.rglob("*.md") if maker.FILES not in path.relative_to(gathered).parts]
    assert {place for _, place in maker.pages()} <= {path.relative_to(gathered).as_posix() for path in pages}
    shown = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert len(re.findall("^```", text, re.MULTILINE)) % 2 == 0, f"{page.name}: a block does not end"
        prose = maker.FENCE.sub("", text)
        for _, target in maker.LINK.findall(prose):
            if not re.match(r"[a-z]+:|#", target):
                assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"
        for source in re.findall(r'<iframe class="step" src="([^"]+)"', text):
            assert (page.parent / source).read_text(encoding="utf-8").startswith("<!doctype html>")
            shown.add(Path(source).stem.replace("-", " "))
    assert shown == set(maker.STEPS), "each step is shown by a page"


def test_a_link_that_leads_nowhere_is_refused(maker):
    page = ROOT / "docs" / "explanation" / "zero.md"
    places = dict(maker.pages())
    assert maker.relinked("[x](program.md#lanes)", page, places, lambda _: None) == "[x](program.md#lanes)"
    assert maker.relinked("[x](../../README.md)", page, places, lambda _: None) == "[x](../index.md)"
    kept = []
    assert maker.relinked("[x](../../LICENSE)", page, places, kept.append) == "[x](../files/LICENSE)"
    assert kept == [ROOT / "LICENSE"]
    assert maker.relinked("```\n[x](nowhere.md)\n```", page, places, lambda _: None) == "```\n[x](nowhere.md)\n```"
    with pytest.raises(maker.BrokenLink, match=r"zero\.md: nowhere\.md leads nowhere"):
        maker.relinked("[x](nowhere.md)", page, places, lambda _: None)


def test_the_reference_of_the_code_has_every_public_name(gathered):
    """Of one folder, with the words of its docstrings."""
    text = (gathered / "api" / "program.md").read_text(encoding="utf-8")
    for name in ("program.instructions", "program.simulate", "Forward", "Program"):
        assert (f" {name}\n" in text) == (name != "program.simulate"), name
    assert not re.search(r"^#+ _", text, re.MULTILINE)
    launch = (gathered / "api" / "launch.md").read_text(encoding="utf-8")
    assert "def launch_on(" in launch
    assert "UserError" in launch.partition("\n### launch_on\n")[2].partition("###")[0], "what is raised is told"


@pytest.mark.slow
def test_sphinx_has_nothing_to_say(maker, tmp_path, capfd):
    """A minute: pictures, the code's reference, and every page; -W makes an error of a warning."""
    assert maker.main(tmp_path / "site") == 0, capfd.readouterr().err
    for name in ("index.html", "explanation/pipeline.html", "api/launch.html", "search.html"):
        text = (tmp_path / "site" / name).read_text(encoding="utf-8")
        assert not re.search(r'(src|href)="https?://[^"]*\.(js|css)', text), "nothing comes from elsewhere"
