"""What setup.cfg can't hold.

- The launcher and the copying threads in C, which the package goes without where they can't be built.
- Archives with the same bytes whenever, wherever and by whomever a commit is built.
- Project URLs, and a long description whose links lead somewhere on every page that shows it. The address of the project is `url` in the
  section [home] of setup.cfg, or PYCUDA_CONV_URL. Without one there are no URLs, and links and pictures of the README become plain text.
"""

import configparser
import gzip
import io
import os
import re
import subprocess
import sysconfig
import tarfile
import zipfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
CONFIG = configparser.ConfigParser(interpolation=None)
CONFIG.read(HERE / "setup.cfg", encoding="utf-8")

RUNTIME = Path("pycuda_conv/runtime")
LAUNCH = [str(RUNTIME / "launch" / f"{part}.c") for part in ("module", "schedule", "turns", "contexts", "keys", "ready", "calls")]
IN_C = [
    Extension(
        f"pycuda_conv.runtime.{name}",
        sources,
        depends=[str(RUNTIME / "launch" / "launch.h")],
        define_macros=[("Py_LIMITED_API", "0x030A0000")],
        extra_compile_args=[] if os.name == "nt" else ["-g0"],  # debugging information names folders of the machine that builds
        py_limited_api=True,
        optional=True,
    )
    for name, sources in (("_launch", LAUNCH), ("_copy", [str(RUNTIME / "_copy.c")]))
]


# ---- the same bytes


def moment() -> int:
    """Seconds that all files in an archive are said to be from: SOURCE_DATE_EPOCH, the commit's time, or the first that a zip can hold."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    if given.isdecimal():
        return max(int(given), 315532800)
    try:  # -C: a checkout, and not one that this folder happens to lie in
        inside = (HERE / ".git").exists()
        told = subprocess.run(["git", "-C", str(HERE), "log", "-1", "--format=%ct"], capture_output=True, text=True, check=True).stdout
        return int(told) if inside else 315532800
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 315532800


def mode(name: str, executable: bool) -> int:
    return 0o755 if executable or name.endswith("/") else 0o644


class Wheel(bdist_wheel):
    """A wheel whose files have one time, one order and no modes of the machine's."""

    def run(self) -> None:
        os.environ.setdefault("SOURCE_DATE_EPOCH", str(moment()))
        super().run()
        for _, _, name in self.distribution.dist_files:
            if name.endswith(".whl"):
                self._settle(Path(name))

    @staticmethod
    def _settle(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            files = [(info, archive.read(info)) for info in archive.infolist()]
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            # RECORD comes last, as the format recommends
            for info, data in sorted(files, key=lambda file: (".dist-info/" in file[0].filename, file[0].filename)):
                info.external_attr = (0o100000 | mode(info.filename, info.external_attr >> 16 & 0o100 != 0)) << 16
                archive.writestr(info, data, zipfile.ZIP_DEFLATED)


class Sources(sdist):
    """An archive of sources whose files have one time, one order, and no owner of the machine's."""

    def make_archive(self, base_name: str, format: str, *args, **options) -> str:  # type: ignore[no-untyped-def]
        path = super().make_archive(base_name, format, *args, **options)
        if not path.endswith(".tar.gz"):
            return path
        when, packed = moment(), io.BytesIO()
        with tarfile.open(path) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member in sorted(old.getmembers(), key=lambda member: member.name):
                member.mtime, member.uid, member.gid, member.uname, member.gname, member.pax_headers = when, 0, 0, "", "", {}
                member.mode = mode(member.name + "/" * member.isdir(), member.mode & 0o100 != 0)
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
        with open(path, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=when) as out:
            out.write(packed.getvalue())
        return path


# ---- where the project is at home


def urls(home: str) -> dict[str, str]:
    pages = {"Documentation": "tree/main/docs", "Changes": "blob/main/CHANGELOG.md", "Issues": "issues"}
    return {"Source": home, **{name: f"{home}/{path}" for name, path in pages.items()}}


def description(home: str) -> str:
    """The README with links from anywhere: to files of the project at `home`, or, without a home, as plain text."""
    text = (HERE / "README.md").read_text(encoding="utf-8")

    def link(found: re.Match[str]) -> str:
        picture, words, place = found["picture"], found["words"], found["place"]
        if re.match(r"[a-z]+://|#|mailto:", place):
            return found[0]
        if not home:
            return f"({words})" if picture else words
        return f"{picture}[{words}]({home}/{'raw' if picture else 'blob'}/main/{place})"

    return re.sub(r"(?P<picture>!?)\[(?P<words>[^\]]*)\]\((?P<place>[^)\s]+)\)", link, text)


home = (os.environ.get("PYCUDA_CONV_URL") or CONFIG.get("home", "url", fallback="")).rstrip("/")
# Python without a GIL has no limited API
with_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
setup(
    ext_modules=IN_C if with_gil else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if with_gil else {},
    cmdclass={"bdist_wheel": Wheel, "sdist": Sources},
    long_description=description(home),
    long_description_content_type="text/markdown",
    project_urls=urls(home) if home else {},
)
