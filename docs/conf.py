"""Settings of the documentation's site: `make docs` builds it with Sphinx, without the network."""

import inspect
import re
from pathlib import Path
from typing import Any

import click
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.inspect import stringify_signature

import tpuembed

REPOSITORY = "https://github.com/tpuembed/tpuembed"

project = "tpuembed"
version = release = tpuembed.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]

myst_heading_anchors = 4  # export.md#serving_config, as on a code host

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
napoleon_custom_sections = [
    ("Attributes", "params_style")
]  # the fields of a dataclass are the arguments of its constructor
smartquotes = False  # `--name` and "name" stay what a user types
default_role = "code"  # `name` in a docstring

nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!tpuembed).*"),  # names of Python and of other libraries have no page here
    ("py:class", r"tpuembed.*"),  # nor have internal types in signatures
]

html_theme = "furo"
html_title = "tpuembed"
html_copy_source = False
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}

_ROOT = Path(__file__).parents[1]


def _link_to_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Make links to files outside of docs/, such as `../SECURITY.md`, links to the repository."""
    folder = Path(app.env.doc2path(page)).parent

    def link(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if path.is_relative_to(app.srcdir):
            return match[0]
        if not path.exists():
            logging.getLogger(__name__).warning("%s does not exist", match[1], location=page)
        return f"]({REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/main/{path.relative_to(_ROOT)}{match[2]})"

    source[0] = re.sub(r"\]\((\.\./[^)#\s]*)([^)\s]*)\)", link, source[0])


def _signature(
    _app: Sphinx, what: str, _name: str, value: Any, _options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show the arguments of Keras layers, whose `__new__` hides them, and fields with a default factory."""
    if signature == "(*args, **kwargs)" and what == "class":
        signature = stringify_signature(inspect.signature(value.__init__.__get__(value)), show_return_annotation=False)
    return signature and signature.replace("<factory>", "..."), returns


def _examples(_app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Show a command's examples, as `--help` does."""
    examples = getattr(context.command, "examples", ())
    if examples:
        lines += ["Examples::", "", *(f"    {example}" for example in examples), ""]


def setup(app: Sphinx) -> None:
    """Connect the functions of this file."""
    app.connect("source-read", _link_to_repository)
    app.connect("autodoc-process-signature", _signature)
    app.connect("sphinx-click-process-epilog", _examples)
