"""What is installed, which GPUs there are, and what the package would use; says what is missing where there is no GPU."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from contextlib import suppress
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any

import pycuda_conv
from pycuda_conv.errors import BackendError, ConvArgumentError
from pycuda_conv.runtime import contexts, default_backend, driver, get_device
from pycuda_conv.runtime import launcher as launchers
from pycuda_conv.runtime.base import KERNEL_DIR
from pycuda_conv.runtime.cache import cache_dir
from pycuda_conv.runtime.compiler import CompileError, Compiler, Nvcc, Nvrtc, nvcc, nvrtc
from pycuda_conv.tools.terminal import console, json_text, table

#: By the name that people know, the module, and the beginning of the names under which it is installed, as ``cupy-cuda13x``.
PACKAGES = {
    "numpy": ("numpy", "numpy"), "PyCUDA": ("pycuda", "pycuda"), "torch": ("torch", "torch"), "CuPy": ("cupy", "cupy"),
    "PyOpenCL": ("pyopencl", "pyopencl"), "PoCL of PyOpenCL": ("pyopencl", "pocl-binary-distribution"), "scipy": ("scipy", "scipy"),
    "Pillow": ("PIL", "pillow"), "dask": ("dask", "dask"), "distributed": ("distributed", "distributed"), "zarr": ("zarr", "zarr"),
    "tifffile": ("tifffile", "tifffile"), "fsspec": ("fsspec", "fsspec"), "ml_dtypes": ("ml_dtypes", "ml-dtypes"),
}
#: Variables of other software that change what is found.
ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "NVIDIA_TF32_OVERRIDE", "OCL_ICD_VENDORS", "POCL_CACHE_DIR")


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def nvidia_smi(*fields: str, pci_bus_id: str | None = None) -> dict[str, str]:
    """The fields that ``nvidia-smi --query-gpu`` gives for the first GPU, or the named one; empty where it can't be asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    which = [] if pci_bus_id is None else ["-i", pci_bus_id]
    text = _output(program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader", *which)
    if not text or not text.strip():
        return {}
    return dict(zip(fields, (value.strip() for value in text.splitlines()[0].split(",")), strict=False))


def compiler_version(make: type[Compiler], path: str | None) -> str | None:
    """Version of a CUDA compiler, if it is there."""
    with suppress(CompileError):
        return make(path).version if path else None
    return None


def _driver() -> Any:
    """PyCUDA's driver module, or None."""
    try:
        return driver.pycuda()
    except BackendError:
        return None


def _importable(module: str) -> bool:
    """Whether a module is there; it is not imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a finder refuses it, or it was made by hand
        return False


def versions() -> dict[str, str | None]:
    """Versions of all software that takes part; None for what is missing. It reads metadata and imports nothing large."""
    found: dict[str, str | None] = {"Python": platform.python_version(), "pycuda_conv": pycuda_conv.__version__}
    installed: dict[str, str] = {}
    for one in distributions():  # of two versions the first is imported
        installed.setdefault(re.sub(r"[-_.]+", "-", one.name or "").lower(), one.version)
    for shown, (module, name) in PACKAGES.items():
        names = [one for one in installed if one == name or one.startswith((f"{name}-cuda", f"{name}-rocm"))]
        there = _importable(module)
        found[shown] = installed[names[0]] if there and names else "of unknown version" if there and module == name else None
    drv = _driver()
    number = drv.get_driver_version() if drv else None
    found["CUDA driver supports"] = f"{number // 1000}.{number % 1000 // 10}" if number else None
    found["NVIDIA driver"] = nvidia_smi("driver_version").get("driver_version")
    found["nvcc"], found["NVRTC"] = compiler_version(Nvcc, nvcc()), compiler_version(Nvrtc, nvrtc())
    found["system"] = platform.platform()
    return found


def attributes(device: Any, names: Any) -> dict[str, int | str]:
    """Every attribute of a PyCUDA device by name; those that the driver does not know are left out."""
    found: dict[str, int | str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(n for n in dir(names) if n[0].isupper()):
            try:
                value = device.get_attribute(getattr(names, name))
            except Exception:  # an attribute newer or older than the driver
                continue
            found[name] = value if type(value) is int else str(value)
    return found


def free_memory(ordinal: int) -> int | None:
    """Free bytes of a GPU. It takes the primary context for a moment, from the driver itself, as PyCUDA would keep it."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    device, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    if library.cuDeviceGet(ctypes.byref(device), ordinal) or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    try:
        if library.cuCtxPushCurrent_v2(context):
            return None
        failed = library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        library.cuCtxPopCurrent_v2(ctypes.byref(context))
        return None if failed else free.value
    finally:
        library.cuDevicePrimaryCtxRelease_v2(device)


def gpus() -> list[dict[str, Any]]:
    """Every GPU that the driver sees."""
    drv = _driver()
    found = []
    for ordinal in range(drv.Device.count() if drv else 0):
        device = drv.Device(ordinal)
        found.append({
            "device": f"cuda:{ordinal}", "name": device.name(), "compute_capability": "{}.{}".format(*device.compute_capability()),
            "memory_total": device.total_memory(), "memory_free": free_memory(ordinal), "pci_bus_id": device.pci_bus_id(),
            "attributes": attributes(device, drv.device_attribute),
        })
    return found


def cuda_contexts(count: int) -> dict[str, Any]:
    """PyCUDA's current context, of which GPUs a primary context is active, and the memory that our pools have in each context.

    Nothing is made current, and no context is made. In a process of its own, as the command is, there is none before.
    """
    if not count:
        return {"pycuda_current": None, "primary_active": [], "pools": []}

    def description(device: Any) -> dict[str, Any]:
        own = not isinstance(device.where, int)
        return {"device": device.name, "kind": "own" if own else "primary", "id": device.where[1] if own else None}

    handle, flags, active = contexts.pycuda_handle(), ctypes.c_uint(), ctypes.c_int()
    current = description(contexts.device_of(handle)) if handle else None
    states = []
    for ordinal in range(count):
        failed = driver.libcuda().cuDevicePrimaryCtxGetState(ordinal, ctypes.byref(flags), ctypes.byref(active))
        if not failed and active.value:
            states.append(f"cuda:{ordinal}")
    pools = [description(one) | {"blocks_in_use": one.pool.in_use, "bytes_held": one.pool.held} for one in contexts.known()]
    return {"pycuda_current": current, "primary_active": states, "pools": pools}


def opencl() -> dict[str, Any]:
    """The OpenCL device that the portable kernels would run on, or why there is none."""
    try:
        device: Any = get_device("opencl")
    except BackendError as error:
        return {"missing": str(error), "device": None, "platform": None}
    return {"missing": None, "device": device.device.name.strip(), "platform": device.device.platform.version.strip()}


def uses(cuda_missing: str | None) -> dict[str, Any]:
    """What a call without `device=` would run on, and why."""
    wanted = os.environ.get("PYCUDA_CONV_BACKEND")
    try:
        backend: str | None = default_backend()
        found = "a GPU and a compiler were found" if backend == "cuda" else cuda_missing
        why = "PYCUDA_CONV_BACKEND says so" if wanted else found
    except BackendError as error:
        backend, why = None, str(error)
    names = sorted(name for name in os.environ if name.startswith("PYCUDA_CONV_")) + [name for name in ENVIRONMENT if name in os.environ]
    try:
        launcher = "in C" if launchers.launcher_in_c() else "in Python"
    except (BackendError, ConvArgumentError) as error:
        launcher = str(error)
    return {
        "backend": backend, "device": {"cuda": "cuda:0", "opencl": "opencl"}.get(backend or ""), "why": why,
        "environment": {name: os.environ[name] for name in names}, "cache": str(cache_dir()), "kernels": str(KERNEL_DIR),
        "launcher": launcher, "copies": "in C" if launchers.copier_in_c() else "in Python",
    }


def collect() -> dict[str, Any]:
    """Everything that ``pycuda-conv info`` reports, in JSON's types."""
    missing = driver.why_not()
    use = uses(missing)  # before OpenCL is loaded, which sets some of the variables
    here = cuda_contexts(0 if _driver() is None else _driver().Device.count())  # before free memory is asked for, which takes a context
    found = gpus()
    return {
        "versions": versions(), "gpu_count": len(found), "gpus": found, "cuda_missing": missing, "opencl": opencl(), "uses": use,
        "contexts": here,
    }


def _context(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none"
    words = "the primary one of torch and CuPy" if found["id"] is None else f"one of its own, number {found['id']}"
    return f"{words}, on {found['device']}"


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def run(as_json: bool = False) -> int:
    """Print what :func:`collect` found."""
    if as_json:
        print(json_text(collect()))
        return 0
    out = console()
    facts = collect()
    cl, use = facts["opencl"], facts["uses"]
    known = [(name, found or "not found") for name, found in facts["versions"].items()]
    out.print(table("Versions", ("what", "version"), known, left=("what", "version")))
    here = [
        ("CUDA", facts["cuda_missing"] or f"usable, {facts['gpu_count']} GPU(s)"),
        ("OpenCL", cl["missing"] or f"usable: {cl['device']} ({cl['platform']})"),
        ("default device", f"{use['device'] or 'none'}: {use['why']}"), ("cache folder", use["cache"]), ("kernels", use["kernels"]),
        ("launcher for GPUs", use["launcher"]), ("threads that copy host arrays", use["copies"]),
        *use["environment"].items(),
    ]
    if facts["gpu_count"]:
        of = facts["contexts"]
        active = ", ".join(of["primary_active"]) or "none"
        here += [("PyCUDA's current context", _context(of["pycuda_current"])), ("active primary contexts", active)]
        here += [
            (f"pool in {_context(pool)}", f"{pool['blocks_in_use']} blocks in use, {_bytes(pool['bytes_held'])} held")
            for pool in of["pools"]
        ]
    out.print(table("What the package uses", ("what", "here"), here, left=("what", "here")))
    for gpu in facts["gpus"]:
        title = f"{gpu['device']}: {gpu['name']}, compute capability {gpu['compute_capability']}, "
        title += f"{_bytes(gpu['memory_total'])} of memory, {_bytes(gpu['memory_free'])} free"
        out.print(table(title, ("attribute", "value"), [(k, str(v)) for k, v in gpu["attributes"].items()], left=("attribute",)))
    if not facts["gpus"]:
        out.print("No GPU was found.")
    return 0
