"""Silencing image decoders, which write to stderr about broken files; a rejected sample carries its reason."""

import ctypes
import logging
import warnings

from PIL import _imaging


def silence_decoders() -> None:
    """Pillow warns of odd metadata (corrupt EXIF, say) that does not touch the pixels, and libtiff prints from C.

    Once for the process: to switch messages off and on around each image is not safe between threads.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    pillow = ctypes.CDLL(_imaging.__file__)  # it finds functions of the libraries that the module is linked to
    for handler in ("TIFFSetWarningHandler", "TIFFSetErrorHandler"):
        if hasattr(pillow, handler):  # not where libtiff is linked in statically
            getattr(pillow, handler)(None)  # libtiff's way of asking for silence
