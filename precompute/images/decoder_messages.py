"""Silencing image decoders, which write to stderr about broken files; a rejected sample carries its reason."""

import ctypes
import logging
import warnings

from PIL import _imaging


def silence_decoders() -> None:
    """Silence Pillow's warnings and libtiff's messages for the whole process.

    Pillow warns about odd metadata, such as corrupt EXIF, that does not affect the pixels; libtiff prints from C.
    Switching messages off and on around each image would not be thread-safe.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    pillow = ctypes.CDLL(_imaging.__file__)  # it finds functions of the libraries that the module is linked to
    for handler in ("TIFFSetWarningHandler", "TIFFSetErrorHandler"):
        if hasattr(pillow, handler):  # not where libtiff is linked in statically
            getattr(pillow, handler)(None)  # libtiff's way of asking for silence
