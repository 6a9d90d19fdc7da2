"""One run of everything on one tree, as a release needs it, kept as docs/results/VERSION.json.

    python3 scripts/release.py measure FOLDER [PART ...] [--seconds N]      on the machine with the GPU: the parts, one after another
    python3 scripts/release.py join FOLDER       in the checkout: the parts become docs/results/VERSION.json, and CHANGELOG gets the date

Parts are the GPU's tests with the sanitizer (`tests`), `verify`, and every command of `make results`, which writes its pages too. By
default all run; two machines, or two GPUs, may share them. `--seconds` ends each part's command after so long, as far as it can be ended.
Each part leaves FOLDER/PART.json with its command, status, seconds, report, and what tells its tree from others. `join` refuses parts that
are missing, failed, or of another tree than the checkout's.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from configparser import ConfigParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pycuda_conv.tools.benchmarks.pages import COMMANDS, digest  # noqa: E402

TAIL = 40  # lines of a command's output that are kept
CHECKS = "tests", "verify"
TIMELESS = "training", "host", "energy"  # commands that run to their end


def tree() -> str:
    """Eight digits that tell the package's and the kernels' sources from others."""
    found = hashlib.sha256()
    for folder, pattern in (("pycuda_conv", "*.py"), ("pycuda_conv/tuned", "*.json"), ("cu", "*.cu*")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:8]


def command(part: str, folder: Path, seconds: float | None) -> list[str]:
    """The command of a part, which writes its report to the folder."""
    if part == "tests":
        return ["bash", "scripts/gpu_check.sh", "--logs", str(folder / "logs"), *(["--seconds", f"{seconds:.0f}"] if seconds else [])]
    package, report = [sys.executable, "-m", "pycuda_conv"], str(folder / f"{part}-report.json")
    if part == "verify":
        return [*package, "verify", "--json"]
    words = COMMANDS[part]
    limited = ["--seconds", f"{seconds:.0f}"] if seconds and part not in TIMELESS else []
    return [*package, *words, *limited, "--json", report, "--pages", "."]


def measure(folder: Path, parts: Sequence[str], seconds: float | None) -> int:
    """Run the parts, and give the number of those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    for part in parts:
        began, words = time.monotonic(), command(part, folder.resolve(), seconds)
        done = subprocess.run(words, cwd=ROOT, env=environment, check=False, stdout=subprocess.PIPE, text=True)
        took, report = time.monotonic() - began, folder / f"{part}-report.json"
        found: Any = None
        if part == "verify":
            found = json.loads(done.stdout) if done.stdout.startswith("{") else None
        elif report.exists():
            found = json.loads(report.read_text())
            report.unlink()
        kept = {
            "part": part, "command": " ".join(words[1:]).removeprefix("-m ").replace(f"{folder.resolve()}/", ""), "tree": tree(),
            "kernels": digest(), "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "seconds": round(took, 1),
            "status": done.returncode, "output": None if part == "verify" else done.stdout.splitlines()[-TAIL:], "report": found,
        }  # fmt: skip
        (folder / f"{part}.json").write_text(json.dumps(kept, indent=1) + "\n")
        print(f"{part}: status {done.returncode}, {took:.0f} s", flush=True)
        failed += done.returncode != 0
    return failed


def wrong(parts: dict[str, Any], found_tree: str) -> list[str]:
    """Why these parts are no release of the tree; empty if they are."""
    missing = [part for part in (*CHECKS, *COMMANDS) if part not in parts]
    reasons = [f"{', '.join(missing)}: missing"] if missing else []
    for name, part in parts.items():
        if part["status"]:
            reasons.append(f"{name}: ended with status {part['status']}")
        if part["tree"] != found_tree:
            reasons.append(f"{name}: of the tree {part['tree']}, not {found_tree}")
    return reasons


def join(folder: Path) -> int:
    """Write docs/results/VERSION.json, and give the number of reasons not to."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    version = setup["metadata"]["version"]
    parts = {name: json.loads((folder / f"{name}.json").read_text()) for name in (*CHECKS, *COMMANDS) if (folder / f"{name}.json").exists()}
    reasons = wrong(parts, tree())
    print("\n".join([*reasons, f"{len(parts)} parts, {len(reasons)} reasons against a release"]))
    if reasons:
        return len(reasons)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    target = ROOT / "docs" / "results" / f"{version}.json"
    target.parent.mkdir(exist_ok=True)
    found = {"version": version, "commit": commit, "tree": tree(), "kernels": digest(), "parts": parts}
    target.write_text(json.dumps(found, indent=1) + "\n")
    heading, changes = f"## {version}, not released yet", ROOT / "CHANGELOG.md"
    today = datetime.datetime.now().astimezone().date().isoformat()
    changes.write_text(changes.read_text().replace(heading, f"## {version}, {today}"))
    print(f"{target.relative_to(ROOT)} is written, and the date in CHANGELOG.md: commit both with the pages")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    measuring, joining = steps.add_parser("measure"), steps.add_parser("join")
    for one in (measuring, joining):
        one.add_argument("folder", type=Path)
    measuring.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join((*CHECKS, *COMMANDS))}; by default all")
    measuring.add_argument("--seconds", type=float)
    given = parser.parse_args(arguments)
    if given.step == "join":
        return int(join(given.folder) > 0)
    unknown = set(given.parts) - {*CHECKS, *COMMANDS}
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join((*CHECKS, *COMMANDS))}")
    return int(measure(given.folder, given.parts or (*CHECKS, *COMMANDS), given.seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
