"""What can go wrong for a user, as exceptions whose text is the whole message."""


def install(extra: str = "") -> str:
    """Return the command that installs what is missing; where the package is installed already, it adds the extra."""
    return f"`pip install 'encode-once{f'[{extra}]' if extra else ''}'`"


class EncodeOnceError(Exception):
    """An error that a user can act on; its text says what broke, where, and what to run."""

    exit_code = 1


class ConfigError(EncodeOnceError):
    """Wrong usage: a config or command line that cannot be run as written."""

    exit_code = 2


class MissingPathError(ConfigError):
    """Nothing of the kind is where a config says that a file or a folder is."""


class SourceError(EncodeOnceError):
    """The images or the sample list cannot be used as they are."""


class ChangedError(SourceError):
    """A file was written to while it was read."""


class ModelError(EncodeOnceError):
    """A model folder or hub id that cannot be used as it is."""


class DeviceError(EncodeOnceError):
    """A device that does not compute what an encoder's weights give."""


class CacheError(EncodeOnceError):
    """A cache that is absent, unfinished or damaged."""


class NoCacheError(CacheError):
    """A path that was given for a cache, where there is none: wrong usage, and no damage."""

    exit_code = 2


class NotAFileError(CacheError):
    """Something else than a file lies where a cache's file belongs."""


class TooLargeError(CacheError):
    """A file is larger than its kind can be, and was not read."""

    size: int
    """Of the file, in bytes."""


class NewerFormatError(CacheError):
    """A cache of a format version that this program does not know."""


class OlderFormatError(CacheError):
    """A cache whose spec lacks a field that every cache of this program has."""


class StaleError(CacheError):
    """A cache, or a run, made from other inputs than those given now."""


class Interrupted(EncodeOnceError):  # noqa: N818 (an outcome, not a fault)
    """Stopped before the end by a signal; what is on disk is whole, and a rerun goes on."""

    exit_code = 3
