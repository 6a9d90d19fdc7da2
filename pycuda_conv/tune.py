"""Measured choices: which configuration was the fastest for a problem on a GPU, as data in JSON files.

The user's table lies in the cache folder; ``tune=True`` and ``pycuda-conv tune`` write it. It goes before the tables that are shipped
with the package, one for each GPU. The engines' models decide what no table knows.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pycuda_conv import engines
from pycuda_conv.errors import ConvArgumentError, DeviceMemoryError
from pycuda_conv.memo import forget_plans
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device
from pycuda_conv.runtime.cache import cache_dir

FORMAT = "pycuda_conv tuned choices"
#: The version of the kernels and their configurations, raised when they change so much that old measurements tell nothing of them.
VERSION = 4

#: A measured configuration replaces the planner's if it is faster by more than this factor; runs of one configuration vary as much.
CHANCE = 1.03

SHIPPED = Path(__file__).resolve().parent / "tuned"
#: By compute capability and multiprocessors: the GPU whose shipped choices such a GPU follows where nothing was measured on its own.
ALIKE = {((9, 0), 132): "NVIDIA H200"}
LOCK_SECONDS = 10  # another process merges its choices in milliseconds


@dataclass(frozen=True)
class Choice:
    """A configuration and the microseconds that it took: on the GPU named by `gpu`, if it was another one."""

    config: engines.Config
    us: float
    gpu: str = ""


#: (GPU, problem) -> choice
Choices = dict[tuple[str, str], Choice]


def key(problem: ConvProblem) -> str:
    """The problem's key in a table: its fields but for those that :attr:`~ConvProblem.plain` drops. It is readable and never changes."""
    return str(problem.plain) + ("" if problem.batched else " unbatched") + (" bias" if problem.has_bias else "")


# ---- the text of a table


def _parsed(text: str) -> Choices:
    """The choices in a table's text; a ``ValueError`` that says why there are none."""
    try:
        table = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f"it has no 'format': '{FORMAT}'")
    if table.get("version") != VERSION:
        raise ValueError(f"it was measured with kernels of version {table.get('version')!r}, these are of version {VERSION}")
    gpus = table.get("choices")
    if not isinstance(gpus, dict) or not all(isinstance(entries, dict) for entries in gpus.values()):
        raise ValueError("its 'choices' are no objects")
    found = {}
    for gpu, entries in gpus.items():
        for problem, entry in entries.items():
            with suppress(engines.GoneError):  # the planner chooses for its problem as if it had not been measured
                found[gpu, problem] = _choice(problem, entry)
    return found


def _choice(problem: str, entry: Any) -> Choice:
    """The choice that an entry is; a ``GoneError`` for one of kernels that this version lacks, a ``ValueError`` for what is no choice."""
    try:
        ((name, values),) = entry["config"].items()
        config, us = engines.config_from_table(name, values), entry["us"]
        right = type(us) in (int, float) and 0 < us < math.inf
    except engines.GoneError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError):
        right = False
    if not right:
        raise ValueError(f"its entry for {problem!r} is no choice: {entry!r:.200}")
    return Choice(config, us)


def _text(choices: Mapping[tuple[str, str], Choice]) -> str:
    """A table's text: a line for each problem, in order, so that tables compare well."""
    gpus: dict[str, list[str]] = {}
    for (gpu, problem), choice in sorted(choices.items()):
        entry = {"config": {type(choice.config).__name__: asdict(choice.config)}, "us": round(choice.us, 3)}
        gpus.setdefault(gpu, []).append(f"   {json.dumps(problem)}: {json.dumps(entry)}")
    lines = [f"  {json.dumps(gpu)}: {{\n" + ",\n".join(entries) + "\n  }" for gpu, entries in gpus.items()]
    inner = "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"
    return f'{{\n "format": {json.dumps(FORMAT)},\n "version": {VERSION},\n "choices": {inner}\n}}\n'


# ---- tables in files


class Table:
    """The choices in one file, read at their first use, and those added since.

    Parameters
    ----------
    path : Path
        The file; it need not exist.
    shared : bool
        Other processes may write the file at the same time.
    """

    def __init__(self, path: Path, shared: bool = True) -> None:
        self.path, self.shared = path, shared
        self._lock = threading.Lock()
        self._choices: Choices | None = None
        self._own: Choices = {}  # added by this process
        self._warned = False

    def get(self, gpu: str, problem: str) -> Choice | None:
        """The choice for a problem, as :func:`key` writes it, on the GPU of that name."""
        choices = self._choices
        if choices is None:
            with self._lock:
                choices = self._known()
        return choices.get((gpu, problem))

    def configs(self, gpu: str) -> list[engines.Config]:
        """The configurations of all choices on the GPU of that name."""
        with self._lock:
            return [choice.config for (name, _), choice in self._known().items() if name == gpu]

    def add(self, gpu: str, problem: str, choice: Choice) -> None:
        """Remember a choice and merge it into the file. If an ``OSError`` is raised, the choice is remembered all the same."""
        with self._lock:
            self._own[gpu, problem] = choice
            self._choices = {**self._known(), **self._own}
            try:
                self._choices = self._merged()
            except NotImplementedError as error:  # a file system without locks
                raise OSError(str(error)) from error

    def _known(self) -> Choices:
        if self._choices is None:
            try:
                self._choices = self.read()
            except (OSError, ValueError) as error:
                self._warn(error)
                self._choices = {}
        return self._choices

    def read(self) -> Choices:
        """The choices in the file; an ``OSError`` or a ``ValueError`` says why they can't be used."""
        try:
            return _parsed(self.path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"the tuned choices in {self.path} are ignored: {error}", RuntimeWarning, stacklevel=2)

    def _merged(self) -> Choices:
        """Write the file's choices of this moment and those that this process added. A file that can't be used is set aside."""
        from filelock import FileLock  # takes longer to import than this package

        path = self.path.resolve()  # behind a link, the file is replaced and not the link
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # kernels are kept only where others can't write
        with FileLock(f"{path}.lock", timeout=LOCK_SECONDS) if self.shared else nullcontext():
            try:
                found = self.read()
            except ValueError as error:
                self._warn(error)
                os.replace(path, f"{path}.unusable")
                found = {}
            merged = {**found, **self._own}
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuned-")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(_text(merged))
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        return merged


_tables: dict[Path, Table] = {}


def _table(path: Path) -> Table:
    return _tables.get(path) or _tables.setdefault(path, Table(path))


def user_table() -> Table:
    """The table that ``tune=True`` and ``pycuda-conv tune`` write."""
    folder = cache_dir()
    return _table(folder / "tuned.json" if folder.is_absolute() else Path(os.devnull, "tuned.json"))  # without a home nothing is kept


def shipped_table(gpu: str) -> Table:
    """The table of the GPU of that name that comes with the package; empty where there is none."""
    return _table(SHIPPED / (re.sub(r"\W+", "_", gpu.lower()) + ".json"))


# ---- the choice


#: Whether measured choices don't count: see :func:`untuned`.
_ignored = False


@contextmanager
def untuned(enabled: bool = True) -> Iterator[None]:
    """Inside the block plans follow the engines' models alone, in all threads. It is for benchmarks."""
    global _ignored
    before, _ignored = _ignored, enabled
    forget_plans()
    try:
        yield
    finally:
        _ignored = before
        forget_plans()


def lookup(problem: ConvProblem, device: Device, own: bool = False) -> Choice | None:
    """The choice measured for `problem` on such a GPU, by the user or by us, or else on a similar one; None if none can run it.

    With `own` other GPUs' measurements don't count.
    """
    if _ignored:
        return None
    name = key(problem) if device.model else ""
    for table, gpu in _tables_of(device):
        choice = table.get(gpu, name)
        if choice is not None and engines.refusal(problem, choice.config, device) is None and _has_order(problem, choice.config, device):
            if gpu == device.model:
                return choice
            return None if own else replace(choice, gpu=gpu)
    return None if own or problem.upsampled or not problem.adapted else _of_zeros(problem, device)


def _of_zeros(problem: ConvProblem, device: Device) -> Choice | None:
    """The choice for the same problem with a border of zeros and in the arithmetic's type, whose kernels run for this one, too."""
    zeros = replace(problem, border=None, border_value=0.0, input_dtype="", result_dtype="")
    choice = lookup(zeros, device)
    if choice is None:
        return None
    config = engines.alike(problem, choice.config)
    if isinstance(config, engines.Bordered) and engines.copies(problem.launched, config):
        return None  # another may need no copy
    return replace(choice, config=config) if engines.refusal(problem, config, device) is None else None


def _has_order(problem: ConvProblem, config: engines.Config, device: Device) -> bool:
    """Whether `config` sums in the order of a batch-invariant layer; True for other problems."""
    return not problem.batch_invariant or engines.order(problem, config) == engines.order(problem, engines.choose(problem, device))


def measured_configs(device: Device) -> tuple[engines.Config, ...]:
    """All configurations that :func:`lookup` may find for such a GPU, whatever the problem."""
    return tuple(dict.fromkeys(config for table, gpu in _tables_of(device) for config in table.configs(gpu)))


def _tables_of(device: Device) -> list[tuple[Table, str]]:
    """The tables with a device's choices, each with the name that the GPU has there; none for a CPU."""
    if not device.model:
        return []
    found = [(user_table(), device.model), (shipped_table(device.model), device.model)]
    alike = ALIKE.get((device.capability, device.multiprocessors), device.model) if device.backend == "cuda" else device.model
    return found if alike == device.model else [*found, (shipped_table(alike), alike)]


def best(found: Sequence[Choice], own: engines.Config) -> Choice:
    """The fastest measured choice, or that of the planner, `own`, if nothing is faster by more than chance."""
    fastest = min(found, key=lambda choice: choice.us)
    planned = next(choice for choice in found if choice.config == own)
    return planned if planned.us <= CHANCE * fastest.us else fastest


#: What measures: the module :mod:`pycuda_conv.measure`, which makes plans and therefore can't be imported here. It puts itself here.
measure: Any = None
_measuring = threading.Lock()


def tuned(problem: ConvProblem, device: Device) -> Choice | None:
    """The choice as :func:`lookup` finds it; if it finds none, `problem` is measured and the result stored. OpenCL is not measured.

    Where memory is too small for a second set of arrays, nothing is measured either; there is a warning.

    Raises
    ------
    ConvArgumentError
        There is something to measure while the caller's stream is being captured, as far as that can be seen: captures by other libraries
        than torch and CuPy can't be.
    """
    found = lookup(problem, device, own=True)
    if found is not None or device.backend != "cuda" or not problem.macs:
        return found or lookup(problem, device)
    if device.capturing():
        raise ConvArgumentError(
            f"tune=True has to measure {problem}, which can't be done while a stream is being captured: call it once before that"
        )
    with _measuring:  # one at a time, or they would slow each other down
        found = lookup(problem, device, own=True)
        if found is None:
            try:
                measured = measure.trials(problem, device)
            except DeviceMemoryError as error:
                warnings.warn(f"{problem} is not tuned: {error}", RuntimeWarning, stacklevel=2)
            else:
                found = best(measured, engines.choose(problem, device))
                store(problem, device, found)
    return found


def store(problem: ConvProblem, device: Device, choice: Choice) -> None:
    """Put a choice into the user's table; one that can't be written keeps it until the process ends, with a warning."""
    table = user_table()
    try:
        table.add(device.model, key(problem), choice)
    except OSError as error:
        warnings.warn(
            f"tuned choices can't be written to {table.path} and end with this process: {error}", RuntimeWarning, stacklevel=2
        )
    finally:  # not before: another thread may plan by the old choices meanwhile
        forget_plans()
