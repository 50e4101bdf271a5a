"""A wrong option is answered in the option's own words, through the real parser."""

import os
from dataclasses import dataclass, field
from typing import Literal

import pytest

from cache_store.program.command_line import parse_config
from cache_store.program.run_program import run_program


@dataclass(frozen=True, kw_only=True)
class Store:
    codec: Literal["none", "zstd"] = "none"
    shards: int = 1
    workers: int | Literal["auto"] = "auto"
    some: list[int] | None = None
    share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Config:
    cache: str
    store: Store = field(default_factory=Store)


def run(argv):
    parse_config(Config, argv, "program")
    return 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--store.codec", "gzip"], "store.codec must be one of none, zstd, got gzip"),
        (["--store.shards", "many"], "store.shards must be a whole number, got many"),
        (["--store.workers", "many"], "store.workers must be a whole number or auto, got many"),
        (["--store.some", "x"], "store.some must be a list of whole numbers, got x"),
        (["--store.shards", "1" * 5_000], "store.shards must be a whole number, got 111"),
        (["--store.share", "1" * 500], "store.share must be a number, got 111"),
        (["--store.codek", "none"], "there is no option --store.codek"),
        (["--store.code", "none"], "there is no option --store.code"),
    ],
)
def test_a_wrong_option_is_named_with_what_was_expected(options, message, capsys):
    assert run_program("program", run, ["--cache", "x", *options]) == 2
    assert message in capsys.readouterr().err


def test_values_are_read_as_yaml_whatever_their_order(tmp_path):
    (tmp_path / "a.yaml").write_text("cache: 2024-01-01\nstore: {codec: zstd, share: 1e-4, shards: 0x10}\n")
    (tmp_path / "b.yaml").write_text("store: {workers: 3, shards: 7}\n")
    files = [f"--config={tmp_path}/a.yaml", f"--config={tmp_path}/b.yaml"]
    store = Store(codec="zstd", shards=9, workers=3, share=0.0001, some=[1, 2])
    expected = Config(cache="2024-01-01", store=store)
    assert parse_config(Config, ["--store.shards=9", *files, "--store.some", "[1, 2]"]) == expected


def test_a_printed_config_is_the_config_again(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config(Config, ["--store.codec", "zstd", "--print_config"])
    assert ended.value.code == 0
    (tmp_path / "config.yaml").write_text(printed := capsys.readouterr().out)
    assert printed.startswith("cache: null\nstore:\n  codec: zstd\n  shards: 1\n")
    again = parse_config(Config, ["--config", str(tmp_path / "config.yaml"), "--cache", "c"])
    assert again == Config(cache="c", store=Store(codec="zstd"))


def test_missing_fields_are_listed(capsys):
    assert run_program("program", run, []) == 2
    assert "missing: cache" in capsys.readouterr().err


@pytest.mark.parametrize("section", ["store:", "store: 3", "store: [none]", "store: nothing"])
def test_a_section_that_is_no_section_is_named(section, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(f"cache: x\n{section}\n")
    assert run_program("program", run, ["--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert "store is a section of fields" in error
    assert len(error.splitlines()) <= 2


@pytest.mark.parametrize("name", ["codec", "shards", "workers"])
def test_null_is_no_value_of_a_field_that_needs_one(name, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(f"cache: x\nstore: {{{name}: null}}\n")
    assert run_program("program", run, ["--config", str(tmp_path / "c.yaml")]) == 2
    assert f"store.{name} cannot be null; give it a value, or leave it out" in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text("cache: x\nstore: {some: null}\n")
    assert run_program("program", run, ["--config", str(tmp_path / "c.yaml")]) == 0


def test_a_word_that_is_no_utf8_is_refused_in_one_line(capsys):
    assert run_program("program", run, ["--cache", os.fsdecode(b"caf\xe9")]) == 2
    assert capsys.readouterr().err == (
        r"program: error: 'caf\udce9' is not UTF-8, as every path and option has to be; rename what it names" + "\n"
    )
    assert run_program("program", run, ["--cache", "café 漢字"]) == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"cache: caf\xe9\n", "is not UTF-8: byte 10 is 0xe9"),
        ("cache: café\n".encode("utf-16-le"), "is not UTF-8: byte 20 is 0xe9"),
        ("cache: x\n".encode("utf-16"), "is not UTF-8: byte 0 is 0xff"),
        (b"[" * 10_000, "is nested too deeply"),
        (
            b"cache: x\nstore: {shards: 1}\ncache: y\n",
            "'cache' is given twice at line 3, column 1",
        ),
        (b"cache: x\nstore:\n  shards: 1\n  shards: 2\n", "'shards' is given twice"),
        (b"cache: [1\nstore: 2", "expected ',' or ']'"),
        (
            b'[{"id": "' + b"long " * 99 + b'"}]',
            "holds no config: expected fields with values, such as `cache: FOLDER`",
        ),
        (b"", "holds no config"),
    ],
)
def test_a_config_file_of_nothing_certain_names_the_place(data, message, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_bytes(data)
    assert run_program("program", run, ["--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(path) in error
    assert len(error.splitlines()) <= 2


def test_a_config_that_is_no_file_is_named(tmp_path, capsys):
    assert run_program("program", run, ["--config", str(tmp_path / "none.yaml")]) == 2
    assert f"program: error: config: {tmp_path / 'none.yaml'} does not exist\n" in capsys.readouterr().err
    assert run_program("program", run, ["--config", str(tmp_path)]) == 2
    assert f"program: error: config: {tmp_path} is not a file\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("stor: {}", "stor"),
        ("stor: {codec: {}}", "stor"),
        ("store: {codek: {}}", "store.codek"),
        (f"{'x' * 1_000}: {{}}", f"{'x' * 200}…"),
    ],
)
def test_an_empty_section_of_an_unknown_name_is_refused(text, name, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(f"cache: x\n{text}\n")
    assert run_program("program", run, ["--config", str(path)]) == 2
    assert capsys.readouterr().err == f"program: error: {path}: there is no field {name}\n"


def test_a_config_may_come_through_a_pipe():
    end, start = os.pipe()
    os.write(start, b"cache: x\nstore: {shards: 2}\n")
    os.close(start)
    assert run_program("program", run, ["--config", f"/dev/fd/{end}"]) == 0
    os.close(end)


def nested_aliases(levels: int) -> str:
    """Each level holds the one below it ten times."""
    lists = ["&a0 [ha, ha]"]
    lists += [f"&a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, levels)]
    return f"cache: [{', '.join(lists)}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nested_aliases(4), "cache must be text, got [['ha', 'ha'], [['ha', 'ha'], ["),
        (nested_aliases(40), "more than 1,000,000 characters, with its aliases written out"),
        ("cache: &a [*a]", "more than 1,000,000 characters"),
        ("cache: &a {b: *a}", "more than 1,000,000 characters"),
        ("cache: &a " + "x" * 10**5 + "\nstore: [" + "*a, " * 20 + "]", "more than 1,000,000 characters"),
        ("# " + "x" * 10**6 + "\ncache: x", "more than 1,000,000 characters"),
    ],
)
def test_a_config_that_grows_without_a_bound_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(text)
    assert run_program("program", run, ["--config", str(tmp_path / "config.yaml")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error) < 500 + len(str(tmp_path))


def test_an_alias_is_no_repetition(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("cache: &name x\nstore: {codec: none, shards: 2}\n")
    assert run_program("program", run, ["--config", str(path)]) == 0


def test_a_config_file_with_a_field_config_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "build.json").write_text('{"config": {"cache": "c"}}')
    assert run_program("program", run, ["--config", str(tmp_path / "build.json")]) == 2
    assert "build.json: there is no field config" in capsys.readouterr().err
