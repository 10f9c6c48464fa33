"""How Sphinx sets the pages; ``docs/make_site.py`` puts them in place and runs it."""

project = "Superstep"
author = "The developers of Superstep"
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["files"]

# Links to headings, as GitHub writes them.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

html_theme = "furo"
html_title = "Superstep"
html_static_path = ["_static"]
html_css_files = ["superstep.css"]
# Everything is carried along: a page opened from a folder asks no network for anything.
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
templates_path = []
# The program's own notation is no language that Pygments knows.
highlight_language = "text"
copybutton_exclude = ".linenos, .gp, .go"
