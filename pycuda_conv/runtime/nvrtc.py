"""NVRTC as a program: ``python nvrtc.py LIBRARY OPTION...`` reads CUDA C from its input and writes a cubin, or the ``--version``.

It runs in a process of its own, because a process that ends while the library compiles in one of its threads crashes. It runs outside the
package and imports ctypes but nothing large, so it starts in a few hundredths of a second.
"""

import ctypes
import glob
import os
import sys


def load(path):  # type: ignore[no-untyped-def]
    """The library. It does not always find its second library in its own folder, so that is loaded as well."""
    for builtins in sorted(glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so.*"))):
        try:
            ctypes.CDLL(builtins)
        except OSError:
            pass
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def version(library):  # type: ignore[no-untyped-def]
    """The version as (13, 0)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _check(library, code, log=b""):  # type: ignore[no-untyped-def]
    if code:
        sys.exit(f"{library.nvrtcGetErrorString(code).decode()}: {log.decode(errors='replace')}")


def main(path, *options):  # type: ignore[no-untyped-def]
    """Compile the text on stdin and write the cubin to stdout."""
    library, program, size = load(path), ctypes.c_void_p(), ctypes.c_size_t()
    if options == ("--version",):
        print("{}.{}".format(*version(library)))
        return
    if version(library) >= (13, 0):
        options += ("-no-cache",)  # compiled texts are kept by our own cache

    def get(what):  # type: ignore[no-untyped-def]
        getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{what}")(program, data)
        return data.raw

    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), sys.stdin.buffer.read(), b"kernel.cu", 0, None, None))
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    code = library.nvrtcCompileProgram(program, len(options), given)
    _check(library, code, get("ProgramLog").rstrip(b"\0\n") if code else b"")
    sys.stdout.buffer.write(get("CUBIN"))
    sys.stdout.buffer.flush()
    os._exit(0)  # nothing is left to tidy up


if __name__ == "__main__":
    main(*sys.argv[1:])
