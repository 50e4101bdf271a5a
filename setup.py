"""What setup.cfg has no words for: an optional extension in C; all else is there."""

import sysconfig

from setuptools import Extension, setup

# One binary for all versions of Python from 3.11 on; builds of it without a GIL know no such thing yet.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "cache_store.cache._gather",
            ["cache_store/cache/_gather.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
            py_limited_api=STABLE,
            extra_link_args=["-pthread"],
            optional=True,  # a machine without a compiler reads as right, and slower
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
