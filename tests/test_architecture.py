"""The tree is the architecture: imports point inward only, and verification needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {"cache_store": set(), "precompute": {"cache_store"}, "trainer": {"cache_store"}}


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_inward_only(package):
    ours = {"precompute", "cache_store", "trainer", "demo", "benchmarks", "tests"}
    for path in (ROOT / package).rglob("*.py"):
        outward = (imported_packages(path) & ours) - MAY_IMPORT[package] - {package}
        assert not outward, f"{path} imports {outward}"


def test_cache_store_never_imports_torch():
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "cache_store").rglob("*.py")]
    modules = [".".join(path.parts) for path in paths if path.name not in ("__init__", "__main__")]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("module", ["precompute", "cache_store", "trainer"])
def test_no_pickle_is_ever_loaded(module):
    """Guarantee 8: the words that load one do not occur."""
    for path in (ROOT / module).rglob("*.py"):
        text = path.read_text()
        assert "pickle" not in imported_packages(path), path
        for call in ("torch.load", "allow_pickle=True", "np.load("):
            assert call not in text or "mmap_mode" in text, f"{path}: {call}"
