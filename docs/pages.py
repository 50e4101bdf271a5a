"""A hook of mkdocs: the site's pages that do not lie in docs/, and links from the site to files that it leaves out."""

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from cache_store.version import __version__
from encode_once import HOMES

ROOT = Path(__file__).parents[1]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PYTHON = "reference/python.md"
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, PYTHON, content=python_page()))
    return files


def python_page() -> str:
    """Write the directives that render each public name from its docstring."""
    sections = {"cache_store": "Read a cache", "trainer": "Train", "precompute": "Encode"}
    page = "# Python\n\n`from encode_once import …`; each name is imported at its first use.\n"
    for program, title in sections.items():
        names = [name for name, home in HOMES.items() if home.partition(".")[0] == program]
        page += f"\n## {title}\n\n" + "".join(f"::: encode_once.{name}\n" for name in names)
    return f"{page}::: precompute.encoders.own.OwnEncoder\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let each link to a file of the repository lead to its page, or to this version's file at the project's home."""
    uri = page.file.src_uri
    source = next((source for source, there in OUTSIDE.items() if there == uri), f"docs/{uri}")

    def followed(link: re.Match[str]) -> str:
        path = normpath(f"{dirname(source)}/{link[0]}").lstrip("/")
        if not (ROOT / path).exists():
            return link[0]  # mkdocs names it
        if path in OUTSIDE or path.startswith("docs/"):
            return relpath(OUTSIDE.get(path, path.removeprefix("docs/")), dirname(uri) or ".")
        return f"{config.extra['home']}/blob/v{__version__}/{path}"

    return LINK.sub(followed, markdown)
