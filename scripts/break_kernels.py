#!/usr/bin/env python3
"""Break kernels, one place at a time, and see whether a test notices.

    python scripts/break_kernels.py                          # 40 places of every file of cu/: hours
    python scripts/break_kernels.py hopper_planes ring.cuh --places 10 --jobs 2 --seconds 600
    python scripts/break_kernels.py hopper_planes --again            # what was noticed before a change, broken again
    python scripts/break_kernels.py --missed --test-seconds 300      # what was not noticed, held against ten times as many tests
    python scripts/break_kernels.py --report

A place is a line of code, and what is broken there: a statement is left out, a number is one larger, an operator is another one. The places
of a file are drawn by a seed, so they are the same as long as the file is. Each broken file is held against tests until the first one
fails, without a GPU: the machine of tests/simt runs the tensor-core kernels, PoCL the portable ones. Which tests run which variants of a
kernel is found out once, and a test counts if the broken line is in one of its variants. What was noticed is written to
tests/data/broken.json after every place, and what is there is not tried again. So it shows after a change of kernels or tests whether they
still notice as much.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "cu"
SEED, PLACES = 45, 40
TESTS_SECONDS = 30.0  # of the tests that a broken kernel is held against, as long as they took when it was whole
SIMT_SECONDS = 2.0  # of a test on the machine of tests/simt: g++ takes most of it
FEWEST_LINES = 12  # of code: smaller files are not broken


# ---- places


@dataclass(frozen=True)
class Place:
    """A line of a file, by its number and text, and what stands there instead."""

    number: int
    was: str
    now: str


OPERATORS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ", " && ": " || ", " || ": " && ",
    " + ": " - ", " - ": " + ", " * ": " + ", " / ": " * ", " % ": " / ", " += ": " -= ", " & ": " | ", " ^ ": " | ",
    "min(": "max(", "max(": "min(",
}  # fmt: skip
#: A call or an assignment that stands alone: no declaration, whose absence the compiler would notice.
STATEMENT = re.compile(
    r"\s*(?!return\b|break\b|continue\b|goto\b|typedef\b|using\b|else\b|case\b)[\w*+(][\w.\->\[\]():,*+ ]*(\(.*\)|=.*|\+\+|--);"
)
DECLARATION = re.compile(r"\s*(const |constexpr |static |extern |unsigned |struct |auto |\[\[)|\s*[\w:]+(<.*>)?[ *&]+\w+\s*(=|;|\(|\[|,)")
#: The lengths of an array that is declared: longer ones are as good.
LENGTHS = re.compile(r"^\s*(\[\[\w+\]\] )?(\w+ )+\w+(\[[^\]]*\])+(?= *[;={])")
#: What decides how fast a kernel runs, and nothing else.
SPEED = re.compile(r"LAUNCH_BOUNDS|registers_(up|down)|prefetch_map|__nanosleep|__launch_bounds__")
NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.])")


def places(file: Path) -> list[Place]:
    """All places of a file that may be broken."""
    found, comment = [], False
    for number, line in enumerate(file.read_text().splitlines(), 1):
        code = line.split("//")[0].rstrip()
        inside = comment or code.lstrip().startswith("/*")
        comment = inside and "*/" not in code
        if inside or not code.strip() or code.lstrip().startswith(("#", "*", "static_assert")) or '"' in code or SPEED.search(code):
            continue
        lengths = LENGTHS.match(code)
        begins = lengths.end() if lengths else 0
        rest = line[len(code) :]
        head, tail = code[:begins], code[begins:]
        broken = [head + tail.replace(was, now, 1) for was, now in OPERATORS.items() if was in tail]
        broken += [code[: one.start(1)] + str(int(one[1]) + 1) + code[one.end(1) :] for one in NUMBER.finditer(code, begins)]
        if STATEMENT.fullmatch(code) and not DECLARATION.match(code):
            broken.append(re.match(r"\s*", code)[0] + ";")  # type: ignore[index]
        found += [Place(number, line, one + rest) for one in dict.fromkeys(broken)]
    return found


def drawn(file: Path, count: int) -> list[Place]:
    """So many of them by the seed, each in a line of its own as long as there are lines. More begin with the same ones."""
    r, by_line = random.Random(f"{SEED} {file.name}"), {}  # type: ignore[var-annotated]
    for place in places(file):
        by_line.setdefault(place.number, []).append(place)
    lines = sorted(by_line)
    r.shuffle(lines)
    return [r.choice(by_line[number]) for number in lines][:count]


def still_there(file: Path, rows: Sequence[dict[str, Any]]) -> list[tuple[Path, Place]]:
    """The places that were noticed, where their lines are still in the file or in a header of its folder; each once."""
    near = sorted((path for path in included(file) if path.parent == file.parent), key=lambda path: path != file)
    lines = {path: path.read_text().splitlines() for path in near}
    found = []
    for row in rows:
        at = next(((path, text.index(row["was"])) for path, text in lines.items() if row["was"] in text), None)
        if at and row["noticed"]:
            found.append((at[0], Place(at[1] + 1, row["was"], row["now"])))
    return found


def included(file: Path) -> set[Path]:
    """A file and the headers that it includes, directly or not."""
    found, todo = {file}, [file]
    while todo:
        for name in re.findall(r'^ *# *include +"(.+)"', todo.pop().read_text(), re.M):
            if KERNELS / name not in found:
                found.add(KERNELS / name)
                todo.append(KERNELS / name)
    return found


def names_of(file: Path) -> tuple[str, str]:
    """What a kernel may be called: as its file, behind the name of its family or not."""
    return f"{file.parent.name}_{file.stem}", file.stem


def targets() -> dict[str, Path]:
    """All files that may be broken, by name: kernels as family_stem, headers with .cuh."""
    files = [path for path in sorted(KERNELS.rglob("*.cu*")) if len({place.number for place in places(path)}) >= FEWEST_LINES]
    return {names_of(path)[0] if path.suffix == ".cu" else path.name: path for path in files}


# ---- tests

#: A plugin of pytest: writes a line for each test that ran a kernel and passed, with its seconds and the kernels' variants. What the
#: machine of tests/simt would run is only listed, which takes no time: such a test is said to take SIMT_SECONDS, and a second for a million
#: threads.
RECORDER = '''
import json, os, time
import pytest
from pycuda_conv.runtime import opencl

ran, listed = set(), []
launcher = opencl.OpenCLDevice.launcher

def note(step, language):
    defines = " ".join(f"{name}={value}" for name, value in sorted(step.defines.items()))
    ran.add(f"{language} {step.file or step.kernel} {defines}")

def launched(self, step):
    note(step, "OpenCL")
    return launcher(self, step)

opencl.OpenCLDevice.launcher = launched

class Listed(BaseException):
    """A test got as far as the machine."""

def run(stages, memory, seed=0, **options):
    steps = [step for stage in stages for step in stage]
    for step in steps:
        note(step, "C++")
    listed.append(sum(step.grid * step.block for step in steps))
    raise Listed

try:
    import simt
    simt.run = run
except ImportError:
    pass

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if call.when == "call" and ran and (report.passed or listed):
        seconds = float(os.environ["SIMT_SECONDS"]) + sum(listed) / 1e6 if listed else call.duration
        with open(os.environ["RECORD"], "a") as file:
            file.write(json.dumps([item.nodeid, seconds, sorted(ran)]) + "\\n")

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    ran.clear()
    listed.clear()
'''


def mentioning(names: Sequence[str]) -> list[str]:
    """The test files that mention kernels, or the configurations of engines that launch them."""
    from pycuda_conv.engines import registry
    from pycuda_conv.tools.kernels import device_of, families

    words = {name for name in names if "_" in name}  # "planes" is in every file
    for engine in registry.ENGINES:
        for architecture in ("sm_90a", "sm_80", "opencl"):
            device = device_of(architecture)
            if engine.unsupported(device) is None and {family.file for family in engine.variants(device)} & set(names):
                words |= {cls.__name__ for cls in engine.CONFIGS}
    if {family.file for family in families("opencl")} & set(names):
        words.add("device")  # tests of a device run the planner's choice
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, sorted(words)))})\b")
    found = [path.name for path in sorted((ROOT / "tests").glob("test_*.py")) if pattern.search(path.read_text())]
    if any(pattern.search(path.read_text()) for path in (ROOT / "tests" / "cases").glob("*.py")):  # whose bodies are in one file
        found = sorted({*found, "test_cases.py"})
    return found


class Tree:
    """A copy of the checkout, whose kernels may be broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        skipped = shutil.ignore_patterns(".git", "build", ".venv", "plots", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, folder, ignore=skipped, dirs_exist_ok=True)

    def pytest(self, arguments: Sequence[str], seconds: float, **environment: str) -> tuple[int | None, str]:
        """The exit status of pytest in this copy, None if it did not end, and what it said."""
        places = [str(self.folder), str(self.folder / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(places), "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
        own["POCL_MAX_PTHREAD_COUNT"] = "2"  # others run beside
        env = os.environ | own | environment
        options = "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not gpu"
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        with subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return None, process.communicate()[0]
        return process.returncode, said


Record = list[tuple[str, float, list[str]]]


def recorded(tree: Tree, test_file: str, seconds: float) -> Record:
    """The tests of a file that pass within so many seconds, with their times and the kernels that they run."""
    (tree.folder / "recorder.py").write_text(RECORDER)
    record = tree.folder / f"{test_file}.jsonl"
    tree.pytest(["-p", "recorder", f"tests/{test_file}"], seconds, RECORD=str(record), SIMT_SECONDS=str(SIMT_SECONDS))
    lines = record.read_text().splitlines() if record.exists() else []
    return [tuple(json.loads(line)) for line in lines]  # type: ignore[misc]


def recorded_all(test_files: Sequence[str], run: Callable[[Sequence[str]], Iterable[Record]], kept: Path | None) -> Record:
    """What the tests of all these files run: from the file where it is kept, if there is one, and written to it."""
    record: dict[str, Record] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    new = [one for one in test_files if one not in record]
    for test_file, found in zip(new, run(new), strict=True):
        record[test_file] = found
        if kept:
            kept.write_text(json.dumps(record, indent=1) + "\n")
    return [test for one in test_files for test in record[one]]


def there_are(tree: Tree, test_file: str) -> set[str]:
    """The tests of a file: what was recorded before may be gone, and one name that is not known ends a run."""
    return set(tree.pytest(["--collect-only", f"tests/{test_file}"], 120)[1].splitlines())


def held_against(record: Record, kernels: set[str], seconds: float, meets: Callable[[str], bool] = lambda variant: True) -> list[str]:
    """Tests that run a variant of the kernels which `meets` is true of, until they take so long together.

    The quickest of each function comes first, then the second ones.
    """
    turns: dict[str, int] = {}
    in_turn = []
    for name, took, ran in sorted(record, key=lambda one: one[1]):
        variants = [variant for variant in ran if variant.split(" ")[1] in kernels]
        if variants:
            function = name.split("[")[0]
            turns[function] = turns.get(function, 0) + 1
            in_turn.append((turns[function], took, name, variants))
    chosen, total = [], 0.0
    for _, took, name, variants in sorted(in_turn):
        if (total + took <= seconds or not chosen) and any(map(meets, variants)):
            total += took
            chosen.append(name)
    return chosen


class Preprocessed:
    """What the preprocessor leaves of variants: a broken line may be in none of a test's."""

    def __init__(self) -> None:
        self.whole: dict[str, str] = {}

    def __call__(self, variant: str, kernels: Path) -> str:
        from pycuda_conv.runtime.base import kernel_file, source_of

        language, file, *defines = variant.split()
        values = {name: int(value) for name, _, value in (one.partition("=") for one in defines)}
        text, own = source_of(file, values), kernel_file(file)
        prelude = text[: len(text) - len(own.read_text())]
        text = prelude + (kernels / own.relative_to(KERNELS)).read_text()
        of_language = "-D__OPENCL_VERSION__=120" if language == "OpenCL" else "-D__CUDA_ARCH__=900"
        command = ["g++", "-E", "-P", "-x", "c++", "-w", of_language, "-I", str(kernels), "-"]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False).stdout

    def changed(self, variant: str, kernels: Path) -> bool:
        """Whether a variant is another one in the folder of broken `kernels`."""
        if variant not in self.whole:
            self.whole[variant] = self(variant, KERNELS)
        return self(variant, kernels) != self.whole[variant]


class Whole:
    """Whether tests pass where nothing is broken. Each is asked once, when it has noticed something."""

    def __init__(self) -> None:
        self.passes: dict[str, bool] = {}

    def __call__(self, tree: Tree, name: str) -> bool:
        if name not in self.passes:
            self.passes[name] = tree.pytest([name], 30 + 4 * TESTS_SECONDS)[0] == 0
            if not self.passes[name]:
                print(f"{name} fails, or takes too long, where nothing is broken", flush=True)
        return self.passes[name]


Choice = Callable[[Path], list[str]]


def tried(tree: Tree, file: Path, place: Place, tests_of: Choice, whole: Whole, seconds: float) -> tuple[str | None, int]:
    """The test that notices what is broken, None if none does, and how many there are. `tests_of` a folder of broken kernels says which."""
    broken = tree.folder / file.relative_to(ROOT)
    lines = file.read_text().splitlines(keepends=True)
    ending = lines[place.number - 1][len(place.was) :]
    lines[place.number - 1] = place.now + ending
    broken.write_text("".join(lines))
    try:
        tests = [name for name in tests_of(tree.folder / "cu") if whole.passes.get(name, True)]
        if not tests:
            return None, 0
        asked = tree.folder / "asked.txt"
        asked.write_text("\n".join(tests))
        status, said = tree.pytest(["-x", f"@{asked}"], 30 + 4 * seconds)
    finally:
        broken.write_text(file.read_text())
    if status == 0:
        return None, len(tests)
    if status is None:
        return "tests that do not end", len(tests)
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said, re.M)
    if failed is None:
        return f"pytest ended with {status}", len(tests)
    if "::" not in failed[1] or whole(tree, failed[1]):
        return failed[1], len(tests)
    return tried(tree, file, place, tests_of, whole, seconds)


# ---- the work


def main() -> int:
    parser = argparse.ArgumentParser(description="Break kernels, one place at a time, and see whether a test notices.")
    parser.add_argument("files", nargs="*", help="kernels as family_stem, headers with .cuh; by default all")
    parser.add_argument("--places", type=int, default=PLACES, help=f"of each file (default {PLACES})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tests side by side; by default as many as cores")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no place after so many seconds")
    parser.add_argument("--record-seconds", type=float, default=600, help="for finding out what the tests of a file run")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="hold them against these test files; by default all that mention them")
    parser.add_argument("--record", type=Path, help="keep there which tests run which kernels, and take from there what is known")
    parser.add_argument("--json", type=Path, default=ROOT / "tests" / "data" / "broken.json", help="where what was noticed is kept")
    parser.add_argument("--again", action="store_true", help="break again what was noticed, and write it to FILE.again.json")
    parser.add_argument("--missed", action="store_true", help="break again what was not noticed")
    parser.add_argument("--test-seconds", type=float, default=TESTS_SECONDS, help=f"of the tests of a place (default {TESTS_SECONDS:.0f})")
    parser.add_argument("--report", action="store_true", help="print what is there and stop")
    options = parser.parse_args()
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.report:
        return report(known)
    all_files = targets()
    for name in options.files:
        if name not in all_files:
            parser.error(f"there is no file {name} to break; there are {', '.join(all_files)}")
    files = {name: all_files[name] for name in options.files or all_files}
    kernels = {path: included(path) for path in sorted(KERNELS.rglob("*.cu"))}
    runs = {name: {one for kernel, parts in kernels.items() if path in parts for one in names_of(kernel)} for name, path in files.items()}
    sys.path.insert(0, str(ROOT))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="broken-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees: Queue[Tree] = Queue()
        for tree in pool.map(lambda i: Tree(Path(folder, str(i))), range(options.jobs)):
            trees.put(tree)

        def with_tree(work: Any) -> Any:
            tree = trees.get()
            try:
                return work(tree)
            finally:
                trees.put(tree)

        test_files = options.tests or mentioning(sorted(set().union(*runs.values())))
        record = recorded_all(
            test_files,
            lambda new: pool.map(lambda one: with_tree(lambda tree: recorded(tree, one, options.record_seconds)), new),
            options.record,
        )
        found = set().union(*pool.map(lambda one: with_tree(lambda tree: there_are(tree, one)), test_files))
        record = [test for test in record if test[0] in found]
        print(f"{len(record)} tests of {len(test_files)} files recorded in {time.monotonic() - began:.0f} s", flush=True)
        if options.again:
            todo = [(name, *at) for name, path in files.items() for at in still_there(path, known.get(name, ()))]
            options.json, known = options.json.with_suffix(".again.json"), {}
        elif options.missed:
            todo = [item for item in work_of(files, {}, 10**6) if missed(known.get(item[0], ()), item[2])]
        else:
            todo = list(work_of(files, known, options.places))
        lock, whole, preprocessed = Lock(), Whole(), Preprocessed()

        def one(item: tuple[str, Path, Place]) -> None:
            name, path, place = item
            if time.monotonic() - began > options.seconds:
                return

            def tests_of(kernels: Path) -> list[str]:
                return held_against(record, runs[name], options.test_seconds, lambda variant: preprocessed.changed(variant, kernels))

            noticed, tests = with_tree(lambda tree: tried(tree, path, place, tests_of, whole, options.test_seconds))
            with lock:
                others = [row for row in known.get(name, ()) if (row["was"], row["now"]) != (place.was, place.now)]
                known[name] = [*others, {**asdict(place), "noticed": noticed, "tests": tests}]
                options.json.parent.mkdir(exist_ok=True)
                made = options.json.with_suffix(".new")
                made.write_text(written(known))
                made.replace(options.json)  # whoever ends this process finds it whole

        list(pool.map(one, todo))
    return report(known)


def work_of(files: dict[str, Path], known: dict[str, Any], count: int) -> Iterator[Any]:
    """The first place of every file, then the second one, and so on, but for those that are known."""
    tried_before = {name: {(row["was"], row["now"]) for row in rows} for name, rows in known.items()}
    of = {name: drawn(path, count) for name, path in files.items()}
    for i in range(count):
        for name, found in of.items():
            if i < len(found) and (found[i].was, found[i].now) not in tried_before.get(name, ()):
                yield name, files[name], found[i]


def missed(rows: Sequence[dict[str, Any]], place: Place) -> bool:
    """Whether a place was tried and no test noticed it, though some had the broken line in their variants."""
    return any(row["noticed"] is None and row["tests"] and (row["was"], row["now"]) == (place.was, place.now) for row in rows)


def written(known: dict[str, Any]) -> str:
    """A line for each place."""
    parts = []
    for name, rows in sorted(known.items()):
        lines = ",\n".join(f"  {json.dumps(row)}" for row in sorted(rows, key=lambda row: (row["number"], row["now"])))
        parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def report(known: dict[str, Any]) -> int:
    """Print how many places of each file were noticed."""
    for name, rows in sorted(known.items()):
        missed = [row for row in rows if row["noticed"] is None]
        print(f"{name:32}{len(rows):5} places{len(rows) - len(missed):5} noticed")
        for row in missed:
            why = "" if row["tests"] else "    (no test without a GPU compiles it)"
            print(f"    line {row['number']}: {row['was'].strip()}   ->   {row['now'].strip()}{why}")
    count, missed = sum(map(len, known.values())), sum(row["noticed"] is None for rows in known.values() for row in rows)
    print(f"{count} places of {len(known)} files, {count - missed} noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
