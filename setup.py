"""The one thing that setup.cfg has no words for; all else is there."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "cache_store._gather",
            ["cache_store/_gather.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,  # a machine without a compiler reads as right, and slower
        )
    ]
)
