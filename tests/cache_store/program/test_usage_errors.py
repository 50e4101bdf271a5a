"""Messages about wrong options and config files, from the real parser."""

import os
from dataclasses import dataclass, field
from typing import Literal

import pytest

from cache_store.program.command_line import parse_config
from cache_store.program.running import run_program


@dataclass(frozen=True, kw_only=True)
class Store:
    codec: Literal["none", "zstd"] = "none"
    shards: int = 1
    workers: int | Literal["auto"] = "auto"
    some: list[int] | None = None
    share: float = 0.5
    note: str | None = "n"
    rest: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Config:
    cache: str
    store: Store = field(default_factory=Store)


def program(*argv: str) -> int:
    return run_program("program", lambda given: parse_config(Config, given, "program") is None, argv)


NOT_UTF8 = r"'caf\udce9' is not UTF-8; every path and option must be, so rename that file or folder"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--store.codec=gzip"], "store.codec must be one of none, zstd, got gzip"),
        (["--store.shards=many"], "store.shards must be a whole number, got many"),
        (["--store.workers=many"], "store.workers must be a whole number or auto, got many"),
        (["--store.some=x"], "store.some must be a list of whole numbers, got x"),
        (["--store.some=0,17"], "store.some must be a list of whole numbers, got 0,17; did you mean [0,17]?"),
        (["--store.shards", "1" * 5_000], "store.shards must be a whole number, got 111"),
        (["--store.shards", "0x" + "f" * 5_000], "store.shards must be a whole number, got 0xfff"),
        (["--store.share", "1" * 500], "store.share must be a number, got 111"),
        *(([f"--store.{n}=none"], f"no option --store.{n}; did you mean --store.codec?") for n in ("codek", "code")),
        (["--cache", "0.tar", "1.tar"], "no further operand 1.tar; quote a pattern or a name with spaces"),
        (["--config=nowhere.yaml"], "program: error: config: nowhere.yaml: No such file or directory\n"),
        (["--config=/"], "program: error: config: /: Is a directory\n"),
        (["--config=/dev/zero"], "program: error: /dev/zero is no config: it has more than 1,000,000 bytes\n"),
        (["--cache", os.fsdecode(b"caf\xe9")], f"program: error: {NOT_UTF8}\n"),
        ([], "missing: cache"),
    ],
)
def test_a_wrong_option_is_named_with_what_was_expected(options, message, capsys):
    assert program(*options) == 2
    error = capsys.readouterr().err
    assert error == message if message.endswith("\n") else message in error


def test_a_config_or_a_run_as_operand_is_told_its_option(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("cache: it\n")
    for place in (tmp_path, tmp_path / "config.yaml"):
        assert program(str(place)) == 2
        assert f"`program --config {tmp_path}/config.yaml`" in capsys.readouterr().err


def test_values_are_read_as_yaml_whatever_their_order(tmp_path):
    (tmp_path / "a.yaml").write_text("cache: &name 2024-01-01\nstore: {codec: zstd, share: 1e-4, shards: 0x10}\n")
    (tmp_path / "b.yaml").write_text("store: {workers: 3, shards: 7, some: null}\n")
    files = [f"--config={tmp_path}/a.yaml", f"--config={tmp_path}/b.yaml"]
    expected = Config(cache="2024-01-01", store=Store(codec="zstd", shards=9, workers=3, share=0.0001, note=None))
    assert parse_config(Config, ["--store.shards=9", *files, "--store.note=null"]) == expected


def test_a_config_may_come_through_a_pipe():
    """As the shell's `--config <(…)`."""
    reading, writing = os.pipe()
    os.write(writing, b"cache: there")
    os.close(writing)
    assert parse_config(Config, [f"--config=/dev/fd/{reading}"]) == Config(cache="there")
    os.close(reading)


def test_a_printed_config_is_the_config_again(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config(
            Config, ["--store.codec", "zstd", "--store.some", "[1, 2]", "--cache", "café 漢字", "--print_config"]
        )
    assert ended.value.code == 0
    (tmp_path / "config.yaml").write_text(printed := capsys.readouterr().out)
    assert printed.startswith("cache: café 漢字\nstore:\n  codec: zstd\n  shards: 1\n")
    expected = Config(cache="café 漢字", store=Store(codec="zstd", some=[1, 2]))
    assert parse_config(Config, ["--config", str(tmp_path / "config.yaml")]) == expected


TEN_TIMES_EACH = ", ".join(f"&a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 40))
NO_CONFIG = "FILE is not a config: expected fields with values, such as `cache: FOLDER`"
NO_NULL = "cannot be null; give it a value, or leave it out"
MERGES = {"<<": "FILE: there is no field a0", "!!merge x": "FILE cannot be read as a config: could not determine"}
MERGED_TEN_TIMES_EACH = "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((f"store:{value}\n", "store is a section, got ") for value in ("", " 3", " [none]")),
        *((f"cache: x\nstore: {{{name}: null}}\n", f"store.{name} {NO_NULL}") for name in ("codec", "shards")),
        (b"cache: caf\xe9\n", "FILE is not UTF-8: byte 10 is 0xe9"),
        ("cache: x\n".encode("utf-16"), "FILE is not UTF-8: byte 0 is 0xff"),
        (b"[" * 10_000, "FILE is nested too deeply"),
        ("cache: x\nstore: {shards: 1}\ncache: y\n", "'cache' is given twice at line 3, column 1"),
        ("cache: x\nstore:\n  shards: 1\n  shards: 2\n", "'shards' is given twice"),
        ("cache: [1\nstore: 2", "expected ',' or ']'"),
        ('[{"id": "' + "long " * 99 + '"}]', NO_CONFIG),
        ("", "FILE is not a config"),
        ("cache: x\nstor: {codec: {}}\n", "program: error: FILE: there is no field stor; did you mean store?\n"),
        ("cache: x\nstore: {codek: {}}\n", "there is no field store.codek; did you mean store.codec?"),
        (
            f"cache: x\n{'x' * 1_000}: {{}}\n",
            f"program: error: FILE: there is no field {'x' * 200}…; there are cache, store\n",
        ),
        ('{"config": {"cache": "c"}}', "program: error: FILE: there is no field config; there are cache, store\n"),
        (f"cache: [&a0 [ha, ha], {TEN_TIMES_EACH}]", "cache must be text, got [['ha', 'ha'], [["),
        (f"store: [&a0 [ha, ha], {TEN_TIMES_EACH}]", "store is a section, got [['ha', 'ha'], [["),
        ("cache: &a [*a]", "cache must be text, got [[["),
        *((f"a0: &a0 {{b: c}}\n{MERGED_TEN_TIMES_EACH}".replace("<<", key), said) for key, said in MERGES.items()),
        (f"cache: 0x{'f' * 5_000}", "Exceeds the limit"),
        ("# " + "x" * 10**6 + "\ncache: x", "more than 1,000,000 bytes"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_a_wrong_config_file_is_refused_in_a_line_or_two(text, message, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert program("--config", str(path)) == 2
    error = capsys.readouterr().err
    expected = message.replace("FILE", str(path))
    assert error == expected if message.endswith("\n") else expected in error
    assert str(path) in error or message.startswith(("store", "cache")), "a field or the file is named"
    assert len(error.splitlines()) <= 2
    assert len(error) < 500 + len(str(tmp_path))
