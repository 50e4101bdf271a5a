"""The site of the documents, built as `make docs` builds it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import encode_once
from cache_store import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
HOME = "https://github.com/encode-once/encode-once"


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    done = build(ROOT, site)
    assert done.returncode == 0, done.stderr
    return site


def test_each_public_name_is_rendered_from_its_docstring(site):
    page = (site / "reference/python/index.html").read_text()
    names = {*encode_once.__all__} - {"__version__"}
    assert not [name for name in names if f'id="encode_once.{name}"' not in page]
    for inherited in ("LatentStream.load_state_dict", "MixedStream.state_dict"):
        assert f'id="encode_once.{inherited}"' in page


def test_a_page_loads_nothing_from_another_host(site):
    pages = [*site.rglob("*.html")]
    assert len(pages) > 20
    loaded = [each for page in pages for each in re.findall(r"<(?:link|script|img|iframe)\b[^>]*>", page.read_text())]
    foreign = [each for each in loaded if re.search(r"""(?:href|src)=["']?(?:https?:)?//""", each)]
    assert not [each for each in foreign if not each.startswith('<link rel="canonical"')]
    styles = [style for path in site.rglob("*.css") for style in re.findall(r"url\(([^)]*)\)", path.read_text())]
    assert not [style for style in styles if "//" in style and "data:" not in style]


def test_a_link_leads_to_its_page_or_to_this_versions_file(site):
    home, page = ((site / name / "index.html").read_text() for name in ("", "guide/building"))
    assert f'href="{HOME}/blob/v{__version__}/cache_store/format/schema.py"' in home
    assert f'href="{HOME}/blob/v{__version__}/configs/llava_cc3m.yaml"' in page
    assert 'href="guide/building/#an-estimate"' in home
    assert 'src="gallery.png"' in home
    assert (site / "gallery.png").is_file()
