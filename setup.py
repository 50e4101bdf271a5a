"""What setup.cfg cannot describe: optional extensions in C, and a README whose links work on an index's page."""

import re
import runpy
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

HOME = "https://github.com/encode-once/encode-once"
SITE = "https://encode-once.github.io/encode-once/"
VERSION = runpy.run_path("cache_store/version.py")["__version__"]

RELATIVE_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)")

# One binary for all versions of Python from 3.11 on; builds of it without a GIL know no such thing yet.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")


def extension(name: str) -> Extension:
    return Extension(
        name,
        [f"{name.replace('.', '/')}.c"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
        py_limited_api=STABLE,
        extra_compile_args=["-O3"],  # vectors, which some Pythons' own flags leave out
        optional=True,  # a machine without a compiler does it as right, and slower
    )


def description() -> str:
    """Return README.md with links to this version's files at HOME; those within the page stay."""

    def absolute(link: re.Match[str]) -> str:
        mark, text, path = link.groups()
        return f"{mark}[{text}]({HOME}/{'raw' if mark else 'blob'}/v{VERSION}/{path})"

    return RELATIVE_LINK.sub(absolute, Path("README.md").read_text(encoding="utf-8"))


setup(
    version=VERSION,
    long_description=description(),
    project_urls={
        "Homepage": HOME,
        "Documentation": SITE,
        "Changelog": f"{HOME}/blob/v{VERSION}/CHANGELOG.md",
        "Issues": f"{HOME}/issues",
    },
    ext_modules=[extension("cache_store.cache._gather")],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
