"""The tree is the architecture: imports point inward only, and verification needs no torch."""

import ast
import configparser
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
PROGRAMS = {"cache_store", "precompute", "trainer"}
MAY_IMPORT = {
    "cache_store": set(),
    "precompute": {"cache_store"},
    "trainer": {"cache_store"},
    "encode_once": PROGRAMS,
}
OUR_MODULE = re.compile(rf"({'|'.join(PROGRAMS)})\.[\w.:]*")
"""A string such as `precompute.sources`, or the beginning of one in an f-string."""


def imported_packages(path: Path) -> set[str]:
    """Return the packages that a file imports, ours also if a string names their module: `import_module` takes it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Constant) and OUR_MODULE.fullmatch(str(node.value)):
            names.add(str(node.value).split(".")[0])
    return names


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("depth", [2, 9], ids=["rooms", "modules"])
def test_no_room_needs_one_that_needs_it(depth):
    """Rooms are the packages' folders and the files beside them; imports run one way, also within a room."""
    arrows: dict[str, set[str]] = {}
    for path in (path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts[:depth]).removesuffix(".__init__")
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        needed = {f"{node.module}{each}" for node in imports for each in ("", *(f".{a.name}" for a in node.names))}
        arrows.setdefault(name, set()).update({".".join(each.split(".")[:depth]) for each in needed} - {name})
    TopologicalSorter(arrows).prepare()  # CycleError where some need each other


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_inward_only(package):
    ours = {*MAY_IMPORT, "demo", "benchmarks", "tests"}
    for path in (ROOT / package).rglob("*.py"):
        outward = (imported_packages(path) & ours) - MAY_IMPORT[package] - {package}
        assert not outward, f"{path} imports {outward}"


def test_cache_store_and_what_a_rerun_decides_never_import_torch():
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "cache_store").rglob("*.py")]
    modules = [".".join(path.parts) for path in paths if path.name not in ("__init__", "__main__")]
    modules += ["precompute.build.compare_images", "precompute.encode.progress"]  # and what they import: facts, decide
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert python(code).returncode == 0


@pytest.mark.parametrize("program", ["cache_store", "precompute", "trainer"])
def test_a_help_loads_no_arrow_no_codec_and_no_decoder(program):
    """They take half a second, of a help's 0.2."""
    heavy = "{'pyarrow', 'numcodecs', 'awscrt', 'rich', 'PIL', 'torch'}"
    code = f"import sys, {program}.cli; sys.exit(' '.join({heavy} & {{*sys.modules}}))"
    assert python(code).stderr.strip() == ""


DECLARED_AS = {"PIL": "pillow", "yaml": "pyyaml"}
"""Distributions that have another name than their module."""

NAMED_WHEN_MISSING = {"cache_store": ["object-stores", "hub"], "precompute": ["video"]}
"""Other extras that a program's errors name."""


def brought_by(*extras: str) -> set[str]:
    """Return the distributions of the base install and of extras in setup.cfg; `cache_store` is no extra."""
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    texts = [declared["options"]["install_requires"], *(declared["options.extras_require"].get(e, "") for e in extras)]
    lines = (line for text in texts for line in text.splitlines() if line and not line.startswith("#"))
    return {line.split()[0].partition("[")[0].lower() for line in lines}


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_program_imports_only_what_its_extra_brings(package):
    brought = brought_by(package, *NAMED_WHEN_MISSING.get(package, []))
    imported = set().union(*(imported_packages(path) for path in (ROOT / package).rglob("*.py")))
    outside = imported - set(sys.stdlib_module_names) - set(MAY_IMPORT)
    assert {DECLARED_AS.get(name, name).lower() for name in outside} <= brought


BUILD = ["--cache=c", "--source.kind=folder", "--source.path=.", "--encoder.model=VAE", "--image.height=65"]
TRAIN = ["--cache=c", "--model.language_model=m", "--run.output=o"]


@pytest.mark.parametrize(
    ("program", "arguments", "named"),
    [("trainer", ["train", *TRAIN], "'encode-once[trainer]'"), ("precompute", ["build", *BUILD], "65x224")],
)
def test_without_torch_its_extra_or_an_earlier_mistake_is_named(tmp_path, program, arguments, named):
    """A size that the encoder would crop is known without torch."""
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLWan"}')
    code = f"import sys; sys.modules['torch'] = None; from {program}.cli import main; sys.exit(main(sys.argv[1:]))"
    done = python(code, *(argument.replace("VAE", str(tmp_path)) for argument in arguments))
    (error,) = done.stderr.splitlines()
    assert (done.returncode, error.startswith(f"{program}: error: "), named in error) == (2, True, True)


EVERY_HELP = """
import sys
program, *absent = sys.argv[1:]
sys.modules.update(dict.fromkeys(absent))  # to import one is a ModuleNotFoundError
from importlib import import_module
program = import_module(f"{program}.cli").PROGRAM
for words in ([], *([name] for name in program.commands)):
    try:
        program.run([*words, "--help"])
    except SystemExit as ended:
        assert not ended.code
"""


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_every_help_works_without_extras_and_cites_no_file_of_a_clone(program):
    extras = (brought_by(name) for name in ("precompute", "trainer", "object-stores", "ray"))
    absent = set().union(*extras) - brought_by()
    assert {"torch", "huggingface_hub"} <= absent
    done = python(EVERY_HELP, program, *absent)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--log-format" in done.stdout
    assert not re.search(r"configs/|examples/|docs/|in a clone", done.stdout)


@pytest.mark.parametrize("module", sorted(MAY_IMPORT))
def test_no_pickle_is_ever_loaded(module):
    """Guarantee 8: no call could load a pickle."""
    for code in ("torch.load(path)", "np.load(path, allow_pickle=True)", "from torch import load"):
        assert any(map(may_unpickle, ast.walk(ast.parse(code))))
    for path in (ROOT / module).rglob("*.py"):
        assert not imported_packages(path) & PICKLERS, path
        for node in ast.walk(ast.parse(path.read_text())):
            assert not may_unpickle(node), f"{path}:{node.lineno}"


def may_unpickle(node: ast.AST) -> bool:
    """Return whether a node is `torch.load` in any form, or allows pickles; numpy's default does not."""
    if isinstance(node, ast.keyword):
        return node.arg == "allow_pickle" and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    if isinstance(node, ast.Attribute):
        return node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id in ("torch", "joblib")
    return isinstance(node, ast.ImportFrom) and node.module == "torch" and any(a.name == "load" for a in node.names)
