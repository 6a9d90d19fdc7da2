"""One run of everything on one tree, as a release needs it, kept as docs/results/VERSION.json, and the pages made from it.

    python3 scripts/release.py measure FOLDER [PART[=SECONDS] ...]      on the machine with the GPU: the parts, one after another
    python3 scripts/release.py join FOLDER       in the checkout: pages and plots are written from the parts; and if nothing is against
                                                 a release, docs/results/VERSION.json, and CHANGELOG gets the date

Parts are the GPU's tests with the sanitizer (`tests`), and every command of `make results`. By default all run; several machines or GPUs
may share them, with one folder each that are put together afterwards. A part begins nothing more after its SECONDS, and says so in its
page; what has no such end is killed GRACE seconds later. `--within N` begins no part that would end later.

Each part leaves FOLDER/PART.json with its command, status, seconds, report, sections of pages, and what tells its tree from others, and
its plots in FOLDER/plots. `join` tells parts that are missing, failed, cut, or of another tree than the checkout's; of another tree they
write no page.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from configparser import ConfigParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pycuda_conv.tools.benchmarks.pages import COMMANDS, PAGES, digest, parts_of  # noqa: E402
from pycuda_conv.tools.report import kernels_words, marks, write_between  # noqa: E402

TAIL = 40  # lines of a command's output that are kept
PARTS = "tests", *COMMANDS
TIMELESS = "images", "loop", "verify"  # commands that run to their end
GRACE = 120.0  # seconds after which a part that should have ended is killed
PLOTS = "docs/plots"


def tree() -> str:
    """Eight digits that tell the package's and the kernels' sources from others."""
    found = hashlib.sha256()
    for folder, pattern in (("pycuda_conv", "*.py"), ("pycuda_conv/tuned", "*.json"), ("cu", "*.cu*")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:8]


def command(part: str, folder: Path, pages: Path, seconds: float | None) -> list[str]:
    """The command of a part, which writes its report and its plots to the folder, and its sections to the checkout `pages`."""
    limit = [] if seconds is None or part in TIMELESS else ["--seconds", f"{seconds:.0f}"]
    if part == "tests":
        return ["bash", "scripts/gpu_check.sh", "--logs", str(folder / "logs"), *limit]
    words = [str(folder / "plots") if word == PLOTS else word for word in COMMANDS[part]]
    report = ["--json"] if part == "verify" else ["--json", str(folder / f"{part}-report.json")]
    return [sys.executable, "-m", "pycuda_conv", *words, *limit, *report, "--pages", str(pages)]


def empty_pages(folder: Path) -> None:
    """Pages whose parts are empty: what is in them afterwards, a command wrote."""
    for page in PAGES:
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join("\n".join(marks(name)) + "\n" for name in parts_of((ROOT / page).read_text(encoding="utf-8"))))


def run(words: Sequence[str], seconds: float | None) -> tuple[int, str]:
    """The status of a command and what it printed; it is killed with all its processes if it takes longer."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            out, _ = process.communicate(timeout=seconds)
            return process.returncode, out
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return 128 + signal.SIGKILL, out


def measure(folder: Path, parts: Mapping[str, float | None], within: float = float("inf")) -> int:
    """Run the parts, each for so many seconds at the most, and give the number of those that failed or were not begun."""
    folder = folder.resolve()
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    failed, first = 0, time.monotonic()
    for part, seconds in parts.items():
        began = time.monotonic()
        if began - first + (seconds or 0) > within:
            print(f"{part}: not begun", flush=True)
            failed += 1
            continue
        with tempfile.TemporaryDirectory() as pages:
            empty_pages(Path(pages))
            words = command(part, folder, Path(pages), seconds)
            status, out = run(words, None if seconds is None else min(seconds + GRACE, first + within - began))
            took, report = time.monotonic() - began, folder / f"{part}-report.json"
            found: Any = None
            if part == "verify":
                found = json.loads(out) if out.startswith("{") else None
            elif report.exists():
                found = json.loads(report.read_text())
                report.unlink()
            sections = {page: parts_of((Path(pages) / page).read_text(encoding="utf-8")) for page in PAGES}
        shown = " ".join(words[1:]).removeprefix("-m ").replace(f"{folder}/", "").replace(pages, ".")
        kept = {
            "part": part, "command": shown, "tree": tree(), "kernels": digest(),
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "seconds": round(took, 1), "status": status,
            "output": None if part == "verify" else out.splitlines()[-TAIL:], "report": found,
            "pages": {page: {name: text for name, text in some.items() if text} for page, some in sections.items()},
        }  # fmt: skip
        (folder / f"{part}.json").write_text(json.dumps(kept, indent=1) + "\n")
        print(f"{part}: status {status}, {took:.0f} s", flush=True)
        failed += status != 0
    return failed


def wrong(parts: Mapping[str, Any], found_tree: str) -> list[str]:
    """Why these parts are no release of the tree; empty if they are."""
    missing = [part for part in PARTS if part not in parts]
    reasons = [f"{', '.join(missing)}: missing"] if missing else []
    for name, part in parts.items():
        if part["status"]:
            reasons.append(f"{name}: ended with status {part['status']}")
        if part["tree"] != found_tree:
            reasons.append(f"{name}: of the tree {part['tree']}, not {found_tree}")
    return reasons


def write_pages(folder: Path, parts: Mapping[str, Any], commit: str) -> None:
    """Put the sections of these parts, which say of which commit they are, and the folder's plots, into the checkout."""
    words = kernels_words(digest())
    for part in parts.values():
        for page, sections in part["pages"].items():
            for name, text in sections.items():
                write_between(ROOT / page, text.replace(words, f"commit `{commit[:8]}`, {words}"), name)
    for plot in sorted((folder / "plots").glob("*.svg")):
        shutil.copyfile(plot, ROOT / PLOTS / plot.name)


def join(folder: Path) -> int:
    """Write the pages and, if nothing is against it, docs/results/VERSION.json; give the number of reasons against it."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    version = setup["metadata"]["version"]
    parts = {name: json.loads((folder / f"{name}.json").read_text()) for name in PARTS if (folder / f"{name}.json").exists()}
    reasons = wrong(parts, tree())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    write_pages(folder, {name: part for name, part in parts.items() if part["tree"] == tree()}, commit)
    print("\n".join([*reasons, f"{len(parts)} parts, {len(reasons)} reasons against a release"]))
    if reasons:
        return len(reasons)
    target = ROOT / "docs" / "results" / f"{version}.json"
    target.parent.mkdir(exist_ok=True)
    kept = {name: {key: value for key, value in part.items() if key != "pages"} for name, part in parts.items()}
    found = {"version": version, "commit": commit, "tree": tree(), "kernels": digest(), "parts": kept}
    target.write_text(json.dumps(found, indent=1) + "\n")
    heading, changes = f"## {version}, not released yet", ROOT / "CHANGELOG.md"
    today = datetime.datetime.now().astimezone().date().isoformat()
    changes.write_text(changes.read_text().replace(heading, f"## {version}, {today}"))
    print(f"{target.relative_to(ROOT)} is written, and the date in CHANGELOG.md: commit both with the pages")
    return 0


def part_and_seconds(text: str) -> tuple[str, float | None]:
    """A part's name, and after "=" its seconds."""
    name, _, seconds = text.partition("=")
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"there is no part {name}; there are {', '.join(PARTS)}")
    try:
        return name, float(seconds) if seconds else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{seconds!r} is no number of seconds") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    measuring, joining = steps.add_parser("measure"), steps.add_parser("join")
    for one in (measuring, joining):
        one.add_argument("folder", type=Path)
    told = f"of {', '.join(PARTS)}; by default all"
    measuring.add_argument("parts", nargs="*", type=part_and_seconds, metavar="PART[=SECONDS]", help=told)
    measuring.add_argument("--within", type=float, metavar="SECONDS", default=float("inf"), help="begin no part that would end later")
    given = parser.parse_args(arguments)
    if given.step == "join":
        return int(join(given.folder) > 0)
    return int(measure(given.folder, dict(given.parts or [(part, None) for part in PARTS]), given.within) > 0)


if __name__ == "__main__":
    sys.exit(main())
