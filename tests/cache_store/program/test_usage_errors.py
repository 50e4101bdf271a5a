"""Messages about wrong options and config files, from the real parser."""

import os
from dataclasses import dataclass, field
from typing import Literal

import pytest

from cache_store.program.command_line import parse_config
from cache_store.program.running import run_program
from tests.named import assert_names


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


def refusal(capsys: pytest.CaptureFixture[str], names: str, *options: str) -> str:
    assert program(*options) == 2
    error = capsys.readouterr().err
    assert_names(error, names)
    assert len(error.splitlines()) <= 2
    return error


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--store.codec=gzip"], "store.codec none, zstd, gzip"),
        (["--store.shards=many"], "store.shards many"),
        (["--store.workers=many"], "store.workers auto, many"),
        (["--store.some=0,17"], "store.some 0,17 [0,17]"),
        (["--store.codek=none"], "--store.codek --store.codec?"),
        (["--cache", "0.tar", "1.tar"], "1.tar --config"),
        (["--config=nowhere.yaml"], "config nowhere.yaml"),
        (["--config=/dev/zero"], "/dev/zero 1,000,000"),
        (["--cache", os.fsdecode(b"caf\xe9")], r"'caf\udce9' UTF-8"),
        ([], "cache"),
    ],
)
def test_a_wrong_option_is_named_with_what_was_expected(options, names, capsys):
    refusal(capsys, names, *options)


def test_values_are_read_as_yaml_whatever_their_order(tmp_path):
    (tmp_path / "a.yaml").write_text("cache: &name 2024-01-01\nstore: {codec: zstd, share: 1e-4, shards: 0x10}\n")
    (tmp_path / "b.yaml").write_text("store: {workers: 3, shards: 7, some: null}\n")
    files = [f"--config={tmp_path}/a.yaml", f"--config={tmp_path}/b.yaml"]
    expected = Config(cache="2024-01-01", store=Store(codec="zstd", shards=9, workers=3, share=0.0001, note=None))
    assert parse_config(Config, ["--store.shards=9", *files, "--store.note=null"]) == expected


def test_a_printed_config_is_the_config_again(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config(
            Config, ["--store.codec", "zstd", "--store.some", "[1, 2]", "--cache", "café 漢字", "--print-config"]
        )
    assert ended.value.code == 0
    (tmp_path / "config.yaml").write_text(printed := capsys.readouterr().out)
    assert printed.startswith("cache: café 漢字\nstore:\n  codec: zstd\n  shards: 1\n")
    expected = Config(cache="café 漢字", store=Store(codec="zstd", some=[1, 2]))
    assert parse_config(Config, ["--config", str(tmp_path / "config.yaml")]) == expected


TEN_TIMES_EACH = ", ".join(f"&a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 40))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("store: 3\n", "store"),
        ("cache: x\nstore: {codec: null}\n", "store.codec"),
        (b"cache: caf\xe9\n", "FILE UTF-8 10 0xe9"),
        (b"[" * 10_000, "FILE"),
        ("cache: x\nstore: {shards: 1}\ncache: y\n", "FILE 'cache' line 3, column 1"),
        ("cache: [1\nstore: 2", "FILE ']'"),
        ("cache: x\nstore: {codek: {}}\n", "FILE store.codek; store.codec?"),
        (f"cache: x\n{'x' * 1_000}: {{}}\n", f"FILE {'x' * 200}… cache, store"),
        ('{"config": {"cache": "c"}}', "FILE config; cache, store"),
        (f"cache: [&a0 [ha, ha], {TEN_TIMES_EACH}]", "cache 'ha'"),
        ("# " + "x" * 10**6 + "\ncache: x", "FILE 1,000,000"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_a_wrong_config_file_is_refused_in_a_line_or_two(text, names, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    error = refusal(capsys, names.replace("FILE", str(path)), "--config", str(path))
    assert len(error) < 500 + len(str(tmp_path))
