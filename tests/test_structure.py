"""The package's modules: who imports whom."""

import ast
from pathlib import Path

import pycuda_conv

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
