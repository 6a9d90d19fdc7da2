"""What setup.cfg can't hold: the launcher in C, which the package goes without where it can't be built."""

import sysconfig

from setuptools import Extension, setup

LAUNCH = Extension(
    "pycuda_conv.runtime._launch",
    ["pycuda_conv/runtime/_launch.c"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    py_limited_api=True,
    optional=True,
)

# Python without a GIL has no limited API
with_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
setup(ext_modules=[LAUNCH] if with_gil else [], options={"bdist_wheel": {"py_limited_api": "cp310"}} if with_gil else {})
