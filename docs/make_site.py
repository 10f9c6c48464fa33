"""The documentation as a site: every page of docs/, the reference of the code, search, pictures that move.

    python docs/make_site.py build/docs       a broken link, or anything that Sphinx warns of, is an error

README.md becomes the first page. A link that leads out of docs/, to a recipe or to a benchmark's result, leads to that
file's copy in the site. A page shows a step that plays where it has

    <!-- step: NAME -->

which GitHub does not show; ``site_steps.py`` has the steps.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from site_api import write_api
from site_steps import STEPS, write_step

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RECIPES = ROOT / "recipes"
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "tests/data/published/README.md": "published.md",
}
"""Pages outside of docs/, and their places in the site."""
CHAPTERS = {"tutorial": "Tutorial", "howto": "How to", "reference": "Reference", "explanation": "Explanation"}
FILES = "files"
"""The site's folder of what is linked to and is no page."""
LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\])\(([^)\s]+)\)")
STEP = re.compile(r"^<!-- step: ([\w -]+) -->$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


class BrokenLink(Exception):
    """A link that leads nowhere."""


def pages() -> Iterator[tuple[Path, str]]:
    """Every page, and its place in the site."""
    for name, place in ELSEWHERE.items():
        yield ROOT / name, place
    for chapter in CHAPTERS:
        for path in sorted((DOCS / chapter).glob("*.md")):
            yield path, f"{chapter}/{path.name}"


def place_of(target: Path, places: dict[Path, str]) -> str:
    """Where in the site a file of the repository lies."""
    if target in places:
        return places[target]
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"{FILES}/{target.relative_to(ROOT).as_posix()}"


def relinked(text: str, page: Path, places: dict[Path, str], keep: Callable[[Path], None]) -> str:
    """The text with each link as the site has it.

    Args:
        text: of the page.
        page: that it is of.
        places: of all pages.
        keep: told of each file that is no page.

    Raises:
        BrokenLink: a file is not there.
    """

    def to(found: re.Match[str]) -> str:
        label, target = found[1], found[2]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        name, hash_, anchor = target.partition("#")
        there = Path(os.path.normpath(page.parent / name))
        if not there.exists():
            raise BrokenLink(f"{page.relative_to(ROOT)}: {target} leads nowhere")
        if there not in places:
            keep(there)
        relative = os.path.relpath(place_of(there, places), Path(places[page]).parent)
        return f"{label}({relative}{hash_}{anchor})"

    pieces, at = [], 0
    for fence in FENCE.finditer(text):
        pieces += [LINK.sub(to, text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*pieces, LINK.sub(to, text[at:])])


def framed(name: str, page: str) -> str:
    """The block in which a page shows a step."""
    up = "../" * page.count("/")
    source = f"{up}_static/steps/{name.replace(' ', '-')}.html"
    frame = f'<iframe class="step" src="{source}" title="{STEPS[name].title}" loading="lazy"></iframe>'
    return f"```{{raw}} html\n{frame}\n```"


def contents() -> str:
    """The site's table of contents."""
    blocks = []
    for chapter, caption in CHAPTERS.items():
        names = [f"{chapter}/{path.stem}" for path in sorted((DOCS / chapter).glob("*.md"))]
        names += ["reference/recipes", "api/index"] if chapter == "reference" else []
        blocks.append(_toctree(caption, names))
    return "\n".join([*blocks, _toctree("Project", ["contributing", "changelog", "published"])])


def _toctree(caption: str, names: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""])


def _keep(there: Path, place: Path) -> None:
    """Copy a file that is no page."""
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(there, place)


def _recipes() -> str:
    """A page of all recipes."""
    blocks = ["# Recipes", "", "Each is a file that trains as it is: `superstep train recipes/NAME.toml`.", ""]
    for path in sorted(RECIPES.glob("*.toml")):
        blocks += [f"## {path.stem}", "", "```toml", path.read_text(encoding="utf-8").rstrip(), "```", ""]
    return "\n".join(blocks)


def gather(source: Path) -> None:
    """Put in place what Sphinx is to set.

    Raises:
        BrokenLink: a link leads nowhere.
    """
    places = dict(pages())
    places[RECIPES] = "reference/recipes.md"
    for page, place in pages():
        text = relinked(
            page.read_text(encoding="utf-8"), page, places, lambda there: _keep(there, source / place_of(there, places))
        )
        text = STEP.sub(lambda found, place=place: framed(found[1], place), text)
        text += f"\n{contents()}" if place == "index.md" else ""
        (source / place).parent.mkdir(parents=True, exist_ok=True)
        (source / place).write_text(text, encoding="utf-8")
    (source / places[RECIPES]).write_text(_recipes(), encoding="utf-8")
    static = source / "_static" / "steps"
    static.mkdir(parents=True)
    for name, step in STEPS.items():
        (static / f"{name.replace(' ', '-')}.html").write_text(write_step(step), encoding="utf-8")
    write_api(ROOT / "src", source / "api")


def main(out: Path) -> int:
    """Make the site; the exit status."""
    with tempfile.TemporaryDirectory(prefix="superstep-docs-") as folder:
        source = Path(folder)
        try:
            gather(source)
        except BrokenLink as error:
            sys.stderr.write(f"{error}\n")
            return 1
        options = ["-W", "--keep-going", "-q", "-c", str(DOCS / "site"), "-d", f"{folder}/.doctrees"]
        options += ["-D", f"html_static_path=_static,{folder}/_static"]
        return subprocess.run([sys.executable, "-m", "sphinx", *options, folder, str(out)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
