"""`cache-store`: inspect, verify and copy caches, on any machine, without torch."""

from typing import Any

import msgspec

from cache_store.options import CopyConfig, GalleryConfig, WithdrawConfig
from cache_store.program.command_line import CACHE, Command, Program
from cache_store.verify.scope import VerifyConfig

# numpy, Arrow and codecs take half a second to import. Each command imports what it needs, so that `--help` is quick.

EXAMPLES = """\
  cache-store info data/cc3m
  cache-store info data/cc3m --json             for a program
  cache-store verify data/cc3m                  records, sizes, seal: seconds
  cache-store verify data/cc3m --level full     every byte of every file
  cache-store verify data/cc3m --level deep     each sample too
  cache-store verify data/cc3m --subset 3/20    every byte of one slice a night
  cache-store gallery data/cc3m -o cc3m.html    look at it
  cache-store copy data/cc3m s3://bucket/cc3m
  cache-store copy data/cc3m data/tars --format webdataset
  cache-store withdraw data/cc3m data/text --ids ids.txt
"""
VERIFIED = {"cache": "The caches: their folders, or their URLs."}
WITHDRAWN_FROM = {"cache": "The caches: their folders, or their URLs. Name all of one plan, so that they still join."}
COPIED = {"cache": "The source cache; only read.", "out": "The copy: a folder, created if missing, or a URL."}

INFO = {
    "--json": "Print all of it as JSON.",
}

RESHARD = "Pack short shards, as extensions leave them, into full ones; the copy has another identity."


def info_command(arguments: Any) -> int:
    """Show what a cache holds and how it was made; while it is built, also how fast, and who is silent."""
    from cache_store.cache.info import describe

    described = describe(arguments.cache)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(described.as_dict()), indent=1).decode())
        return 0
    lines = described.as_lines()
    width = max(len(field) for field, _ in lines)
    print(*(f"{field:<{width}}  {value}" for field, value in lines), sep="\n")
    return 0


def verify_command(arguments: Any) -> int:
    """Check every byte of caches, or only its records and sizes; exits 1 if anything is damaged."""
    from cache_store.verify.command import run_verify

    return run_verify(arguments.cache, arguments.config)


def copy_command(arguments: Any) -> int:
    """Copy a cache to another place, or into another form or codec, checked on both sides; run again to resume.

    Without options, the copy has the same bytes; with them, the same samples.
    """
    from cache_store.copy.copy import run_copy

    return run_copy(arguments.cache, arguments.out, arguments.config, reshard=arguments.reshard)


def withdraw_command(arguments: Any) -> int:
    """Take samples out of sealed caches: their latents and texts leave every file; run again to finish after a stop.

    It copies the other samples of a shard, and needs no encoder. Their rows stay, rejected as withdrawn, and no command
    brings the samples back.
    """
    from cache_store.copy.withdraw import run_withdraw

    return run_withdraw(arguments.cache, arguments.config)


def gallery_command(arguments: Any) -> int:
    """Show rows of a cache on one self-contained HTML page."""
    from cache_store.gallery.gallery import make_gallery, print_gallery

    print_gallery(make_gallery(arguments.cache, arguments.config))
    return 0


COMMANDS = {
    "info": Command(info_command, operands=CACHE, options=INFO),
    "verify": Command(verify_command, VerifyConfig, VERIFIED, repeats_operand=True),
    "copy": Command(copy_command, CopyConfig, COPIED, {"--reshard": RESHARD}),
    "withdraw": Command(withdraw_command, WithdrawConfig, WITHDRAWN_FROM, repeats_operand=True),
    "gallery": Command(gallery_command, GalleryConfig, CACHE),
}

PROGRAM = Program("cache-store", "Look into a cache of latents and verify it; needs no torch.", EXAMPLES, COMMANDS)
main = PROGRAM.main
