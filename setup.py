"""Optional extensions in C, which setup.cfg cannot describe; everything else is there."""

import sysconfig

from setuptools import Extension, setup

# One binary for all versions of Python from 3.11 on; builds of it without a GIL know no such thing yet.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")


def extension(name: str) -> Extension:
    return Extension(
        name,
        [f"{name.replace('.', '/')}.c"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
        py_limited_api=STABLE,
        extra_compile_args=["-O3"],  # vectors, which some Pythons' own flags leave out
        optional=True,  # a machine without a compiler does it as right, and slower
    )


setup(
    ext_modules=[
        extension("cache_store.cache._gather"),
        extension("cache_store.format._sums"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
