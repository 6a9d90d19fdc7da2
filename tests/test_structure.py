"""The package's modules: who imports whom."""

import ast
from collections import Counter
from pathlib import Path

import pycuda_conv
from pycuda_conv.runtime.base import KERNEL_DIR

PACKAGE = Path(pycuda_conv.__file__).parent
MODULES = {
    ".".join(("pycuda_conv", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports(name: str) -> set[str]:
    """The package's modules that a module imports anywhere in its text; for type checkers alone does not count."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole & MODULES.keys() or {str(node.module)}
    return (found & MODULES.keys()) - {name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import one another, directly or through others."""
    reached = {name: set(after) for name, after in graph.items()}
    while True:
        more = {name: after.union(*(reached[one] for one in after)) for name, after in reached.items()}
        if more == reached:
            break
        reached = more
    found = {tuple(sorted(one for one in after if name in reached[one])) for name, after in reached.items() if name in after}
    return [list(circle) for circle in sorted(found)]


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}) == [["b", "c"], ["d"]]


def test_no_modules_import_each_other():
    """An import inside of a function counts: it hides a circle and does not open it."""
    assert circles({name: imports(name) for name in MODULES}) == []


# ---- sizes

MOST_LINES, MOST_FILES = 600, 30

#: Files of more lines, and why they are not cut.
LONG = {
    "problem.py": "one idea: what a convolution is, and all that is refused",
}  # fmt: skip


def source_files() -> list[Path]:
    return [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h") and "__pycache__" not in path.parts]


def test_files_are_short():
    """A file that became short leaves the list, so it does not grow again."""
    long = {
        path.relative_to(PACKAGE).as_posix() for path in source_files() if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES
    }
    assert long == LONG.keys()


def test_folders_have_few_files():
    count = Counter(path.parent for path in [*source_files(), *KERNEL_DIR.rglob("*.cu*")])
    assert not {folder: files for folder, files in count.items() if files > MOST_FILES}


# ---- tables of repeated calls


def test_calls_are_repeated_from_one_kind_of_table():
    """Whatever is asked whether a call was made before is a ``RepeatTable``, and C is asked through :mod:`pycuda_conv.repeat` alone."""
    made, asked, others = set(), set(), set()
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith("RepeatTable"):
                made |= {(name, ast.unparse(target).split(".")[-1]) for target in node.targets}
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("repeat.call", "repeat.replay", "repeat.remember"):
                asked.add((name, ast.unparse(node.args[0])))
            if isinstance(node, ast.Attribute) and node.attr in (
                "call", "again", "replay", "gradients", "fold"
            ) and "native" in ast.unparse(node.value):
                others.add(name)
    names = {name for _, name in made}
    assert others == {"pycuda_conv.repeat"} and len(made) > 5
    assert not {(name, table) for name, table in asked if table.split(".")[-1] not in names | {"table"}}, "these are no RepeatTables"
    assert {name for name, table in asked if table == "table"} <= {"pycuda_conv.execute"}  # plans hand theirs on


# ---- the way of an argument

#: The floors that the input of conv2d passes, the highest first. `repeat` repeats calls of arrays: `arrays` tell it their classes.
FLOORS = ("ops",), ("dispatch",), ("plan",), ("execute",), ("arrays", "repeat"), ("runtime",)


def floor(name: str) -> int | None:
    """The number of a module's floor; None for one that stands on none, such as what all floors share."""
    room = name.split(".")[1] if "." in name else ""
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def climbs(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports of a module of a floor by one of a lower floor, directly or through modules of no floor."""
    found = []
    for name in graph:
        own, seen, todo = floor(name), {name}, [name]
        while own is not None and todo:
            for other in sorted(graph[todo.pop()] - seen):
                seen.add(other)
                theirs = floor(other)
                if theirs is None:
                    todo.append(other)
                elif theirs < own:
                    found.append((name, other))
    return sorted(found)


def test_climbs_are_found():
    graph = {
        "p.ops": {"p.plan"}, "p.plan": {"p.engines.a", "p.arrays"}, "p.engines.a": {"p.problem", "p.ops"}, "p.arrays": {"p.plan"},
        "p.problem": set()
    }
    assert climbs(graph) == [("p.arrays", "p.plan"), ("p.plan", "p.ops")]


def test_the_input_of_a_call_only_goes_down():
    assert all(any(floor(name) == number for name in MODULES) for number in range(len(FLOORS)))
    assert climbs({name: imports(name) for name in MODULES}) == []
