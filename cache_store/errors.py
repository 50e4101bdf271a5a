"""Errors for users: exceptions whose text is the whole message."""


def install(extra: str = "") -> str:
    """Return the command that installs the package with an extra; it also adds the extra to an installed package."""
    return f"`pip install 'encode-once{f'[{extra}]' if extra else ''}'`"


class EncodeOnceError(Exception):
    """An error that a user can act on; its text says what broke, where, and what to run."""

    exit_code = 1


class ConfigError(EncodeOnceError):
    """Wrong usage: a config or command line that cannot be run as written."""

    exit_code = 2


class MissingPathError(ConfigError):
    """A file or folder that a config names does not exist or is of the wrong kind."""


class SourceError(EncodeOnceError):
    """The images or the sample list cannot be used as they are."""


class ChangedError(SourceError):
    """A file was written to while it was read."""


class ModelError(EncodeOnceError):
    """A model folder or hub id that cannot be used as it is."""


class DeviceError(EncodeOnceError):
    """A device does not compute the result that an encoder's weights give."""


class CacheError(EncodeOnceError):
    """A cache that is absent, unfinished or damaged."""


class NoCacheError(CacheError):
    """A path was given as a cache, but holds none: wrong usage, not damage."""

    exit_code = 2


class NotAFileError(CacheError):
    """A folder, pipe or broken link is in the place of a cache's file."""


class TooLargeError(CacheError):
    """A file is larger than its kind can be, and was not read."""

    size: int
    """The file's size, in bytes."""


class NewerFormatError(CacheError):
    """A cache of a format version that this program does not know."""


class OlderFormatError(CacheError):
    """A cache whose spec lacks a field that every cache of this program has."""


DAMAGE = (CacheError, FileNotFoundError, NotADirectoryError)
"""Errors that show that a cache's file is damaged or gone; any other OSError says only that it was not read."""


class StaleError(CacheError):
    """A cache or a run was made from inputs that differ from the ones given now."""


class Interrupted(EncodeOnceError):  # noqa: N818 (an outcome, not a fault)
    """A signal stopped the program early; the files on disk are whole, and a rerun resumes."""

    exit_code = 3
