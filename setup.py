"""What setup.cfg can't hold: the launcher and the copying threads in C, which the package goes without where they can't be built."""

import sysconfig

from setuptools import Extension, setup

IN_C = [
    Extension(
        f"pycuda_conv.runtime.{name}",
        [f"pycuda_conv/runtime/{name}.c"],
        define_macros=[("Py_LIMITED_API", "0x030A0000")],
        py_limited_api=True,
        optional=True,
    )
    for name in ("_launch", "_copy")
]

# Python without a GIL has no limited API
with_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
setup(ext_modules=IN_C if with_gil else [], options={"bdist_wheel": {"py_limited_api": "cp310"}} if with_gil else {})
