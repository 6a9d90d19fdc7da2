"""The run: the tasks of the result's chunks, on threads of this process or on a cluster."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pycuda_conv.runtime import default_backend, device_count, waiting
from pycuda_conv.tools.files import Settings, progress
from pycuda_conv.tools.terminal import ToolError, named_device, require
from pycuda_conv.tools.volumes.source import Source, is_url, kind_of, read
from pycuda_conv.tools.volumes.target import Store, Target, check_output, record, writing
from pycuda_conv.tools.volumes.work import Work, plan_work

#: Seconds that a scheduler may take to answer.
CONNECT_SECONDS = 10
#: Seconds that threads may take to end before a line says what they are doing.
PATIENCE = 0.7


def convolve(settings: Settings) -> str:
    """Convolve one array into another; returns a description of what was done."""
    require("dask.array")
    source_place = str(settings.input) if is_url(settings.input) else str(Path(settings.input).resolve())
    source = read(source_place, settings.axes)
    kind = kind_of(settings.output)
    if kind == "zarr" and not is_url(settings.output) and not str(settings.output).lower().rstrip("/").endswith(".zarr"):
        raise ToolError(f"{settings.output} must end in .zarr, .npy, .tif or .tiff")
    if settings.batch is not None:
        raise ToolError("--batch is for a .npy file that becomes another; here the stored chunks decide what is computed at a time")
    if settings.scheduler is not None and kind != "zarr":
        raise ToolError(f"{settings.output} must be a .zarr: several workers can't write one file")
    if settings.output_padding is not None and not settings.transposed:
        raise ToolError("--output-padding goes with --transposed only")
    output = check_output(settings, (source_place, settings.bias, settings.filter))
    work = plan_work(settings, source)
    if kind == "tiff" and work.result.ndim < 2:
        raise ToolError(f"{settings.output} can't be written: a TIFF has two axes or more, the result has {work.result.ndim}")
    if settings.devices is None and settings.scheduler is None:
        named_device(settings.device)
    y = work.result
    if kind == "tiff" and y.dtype.kind == "b":
        print(f"{settings.output}: a stack in TIFF has no bool, and holds 0 and 1 as uint8", file=sys.stderr)
        y = y.astype(np.uint8)
    if kind == "zarr":
        y = y.rechunk(tuple(chunks[0] for chunks in y.chunks))
    target = Target(output, str(settings.output), kind, y.shape, y.dtype, work.chunks, work.axes, zarr_format=source.zarr_format)
    target = replace(target, like=source, same_grid=_same_grid(source, work))
    if kind == "zarr" and source.ome is not None:
        target = replace(target, name="0", ome=_described(source, work))
    with writing(settings, target, _fingerprint(settings, source, y)) as (made, records, done):
        _execute(settings, made, records, done, y, source)
    which = f"the first of {source.series} series of pages, " if source.series > 1 else ""
    return f"{which}{work.problem}, {math.prod(source.shape) * source.dtype.itemsize + y.nbytes:,} bytes read and written"


def _same_grid(source: Source, work: Work) -> bool:
    """Whether the result's pixels lie where those of the input do."""
    before = dict(zip(source.axes or "", source.shape, strict=False))
    after = dict(zip(work.axes or "", work.result.shape, strict=False))
    near = all(step == 1 and abs(first) <= 0.5 for step, first in work.places.values())  # an even filter has no middle pixel
    return near and all(before.get(a) == after.get(a) for a in work.places)


def _fingerprint(settings: Settings, source: Source, y: Any) -> dict[str, Any]:
    """The values that must be equal in an interrupted run and the run that resumes it."""

    def content(name: Any) -> str:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest() if Path(name).is_file() else str(name)

    return {
        "input": source.place, "shape": source.shape, "dtype": source.dtype.str, "axes": source.axes, "filter": content(settings.filter),
        "bias": None if settings.bias is None else content(settings.bias), "stride": settings.stride, "padding": settings.padding,
        "dilation": settings.dilation, "groups": settings.groups, "transposed": settings.transposed,
        "output_padding": settings.output_padding, "precision": settings.precision, "algorithm": settings.algorithm,
        "chunks": y.chunks, "activation": settings.activation, "border": settings.border, "result_dtype": settings.dtype,
    }


def _described(source: Source, work: Work) -> str:
    """OME's description of the group with the result in it, at one scale."""
    attributes = json.loads(source.ome)
    inner = attributes.get("ome", attributes)
    scales = inner["multiscales"][0]
    axes = work.axes or ""
    before = source.axes or ""
    dataset = {**scales["datasets"][0], "path": "0"}
    scale = {**scales, "datasets": [dataset]}
    for one, places in ((dataset, work.places), (scale, {})):
        if one.get("coordinateTransformations"):
            one["coordinateTransformations"] = _transforms(one["coordinateTransformations"], before, axes, places)
    if scales.get("axes"):
        kept = dict(zip(before, scales["axes"], strict=True))
        scale["axes"] = [kept.get(letter, {"name": letter, "type": "channel"}) for letter in axes]
    inner["multiscales"] = [scale]
    if "c" in axes and work.result.shape[axes.index("c")] != dict(zip(source.axes or "", source.shape, strict=False)).get("c"):
        inner.pop("omero", None)  # they have the names and colours of other channels
    return json.dumps(attributes)


def _transforms(given: list[Any], before: str, axes: str, places: dict[str, tuple[float, float]]) -> list[Any]:
    """OME's scale and translation of the axes `before`, converted to `axes`, whose pixels lie at `places`."""
    made, size, first = [], dict.fromkeys(axes, 1.0), {letter: place for letter, (_, place) in places.items() if place}
    for transform in given:
        kind = transform.get("type")
        values = transform.get(kind) if kind in ("scale", "translation") else None
        if not isinstance(values, list):
            made.append(transform)
            continue
        own = dict(zip(before, values, strict=False))
        if kind == "scale":
            size.update(own)
            numbers = [own.get(letter, 1.0) * places.get(letter, (1, 0))[0] for letter in axes]
        else:
            numbers = [own.get(letter, 0.0) + first.get(letter, 0) * size[letter] for letter in axes]
        made.append({**transform, kind: numbers})
    if first and not any(transform.get("type") == "translation" for transform in given):
        made.append({"type": "translation", "translation": [first.get(letter, 0.0) * size[letter] for letter in axes]})
    return made


def _execute(settings: Settings, target: Target, records: str | None, done: set[str], y: Any, source: Source) -> None:
    """Compute and write the chunks of `y` that have no record."""
    da, layers = require("dask.array"), require("dask.layers")
    axes = tuple(range(y.ndim))
    written = da.blockwise(
        Store(target, records), axes, y, axes, layers.ArraySliceDep(y.chunks), axes, layers.ArrayBlockIdDep(y.chunks), axes,
        align_arrays=False, token="store", dtype=int, meta=np.empty((0,) * y.ndim, int),
    )
    tasks = {index: task for index, task in np.ndenumerate(written.to_delayed()) if record(index) not in done}
    share = (math.prod(source.shape) * source.dtype.itemsize + y.nbytes) / max(y.nbytes, 1)
    with progress(os.path.basename(str(settings.input).rstrip("/")), int(y.nbytes * share)) as advance:

        def finished(nbytes: int) -> None:
            advance(int(nbytes * share))

        if done:
            everything = y.nbytes
            left = sum(math.prod(y.chunks[i][n] for i, n in enumerate(index)) for index in tasks) * y.dtype.itemsize
            finished(everything - left)
        if settings.scheduler is None:
            _on_threads(settings, list(tasks.values()), finished)
        else:
            _on_cluster(settings.scheduler, list(tasks.values()), finished)


def _on_threads(settings: Settings, tasks: list[Any], finished: Callable[[int], Any]) -> None:
    dask, callbacks = require("dask"), require("dask.callbacks")
    wanted = {task.key for task in tasks}
    gpus = 1
    if settings.devices is not None or (settings.device is None and default_backend() == "cuda"):
        gpus = len(settings.devices) if isinstance(settings.devices, list) else device_count()

    def after(key: Any, result: Any, *_: Any) -> None:
        if key in wanted:
            finished(result)

    pool = ThreadPoolExecutor(min(4 * gpus, max(os.cpu_count() or 1, 2)))  # some threads read and write while others convolve
    try:
        with callbacks.Callback(posttask=after):
            dask.compute(*tasks, scheduler="threads", pool=pool, optimize_graph=True)
    except BaseException:
        waiting.stop()
        raise
    finally:
        _end(pool)
        waiting.stop(False)


def _end(pool: ThreadPoolExecutor) -> None:
    """Wait for the threads that still read or write; say so where that takes long."""
    ending = threading.Thread(target=pool.shutdown, kwargs={"wait": True, "cancel_futures": True})
    ending.start()
    ending.join(PATIENCE)
    if ending.is_alive():
        print("stopping: chunks are still being read or written", file=sys.stderr, flush=True)
        ending.join()


def _on_cluster(address: str, tasks: list[Any], finished: Callable[[int], Any]) -> None:
    distributed = require("distributed")
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "distributed"]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # their messages come back as exceptions
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ToolError(f"--scheduler {address} can't be reached: {error}") from error
    with client:
        futures = client.compute(tasks)
        try:
            for future in distributed.as_completed(futures, loop=client.loop):
                finished(future.result())
                future.release()  # otherwise the result is computed again if its worker dies later
        except BaseException as error:
            of_a_worker = any(future.status == "error" for future in futures)
            if isinstance(error, (CancelledError, OSError)) and not of_a_worker:
                raise ToolError(f"the scheduler at {address} is gone; a run with --resume goes on from what is complete") from error
            client.cancel(futures)
            _wait_until_idle(client, futures)
            raise


def _wait_until_idle(client: Any, futures: list[Any]) -> None:
    """Wait for tasks that can't be stopped, so that none writes to a file that is removed."""
    keys = {future.key for future in futures}

    def writing(dask_worker: Any) -> bool:
        return any(task.key in keys for task in dask_worker.state.executing)

    until, idle = time.monotonic() + 30, 0
    with suppress(Exception):  # workers that are gone write nothing
        while idle < 3 and time.monotonic() < until:  # a task may begin before its worker hears that it was cancelled
            idle = 0 if any(client.run(writing).values()) else idle + 1
            time.sleep(0.1)
