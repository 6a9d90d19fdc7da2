"""What is done once for all engines: the choice between them, predictions, candidates to measure.

An engine may import this module, and so ask for other engines' configurations: it knows no engine by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pycuda_conv.engines import calibration, packing, split_sum
from pycuda_conv.engines.base import BY_RULE, Config, Engine, GoneError, fastest, unsupported_by
from pycuda_conv.engines.costs import costs
from pycuda_conv.engines.geometry import near_sides
from pycuda_conv.engines.hopper.common import MEMORY
from pycuda_conv.engines.schedule import GRID_LIMIT, Schedule
from pycuda_conv.engines.variants import VariantSet
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device

#: What :mod:`pycuda_conv.engines` has of this module.
__all__ = [
    "BATCHES", "alternatives", "candidates", "choose", "config_classes", "config_from_table", "engine_of", "fastest_first", "filter_key",
    "find", "order", "predicted", "predictions", "reads_c_order", "refusal", "same_bits", "schedule", "uses_tensor_cores", "with_moments",
]  # fmt: skip

#: All engines; :mod:`pycuda_conv.engines.peers` lists them here. Among equal predictions that of the first engine wins.
ENGINES: tuple[Engine, ...] = ()

#: Those that transform.
TRANSFORMS: tuple[Engine, ...] = ()

NEAR, MOST_NEAR = 1.6, 24  # tuning measures the configurations within this factor of the best prediction, and at most this many
CLOSE = 1.25  # where timings correct the models, engines whose choice is within this factor of the best are asked for all their tiles
COST = costs("registry")
BEST = 2  # configurations of each engine to measure at any prediction, since a model may be wrong


def engine_of(config: Config) -> Engine:
    """The engine whose configuration `config` is.

    Raises
    ------
    TypeError
        No engine has such configurations.
    """
    for engine in ENGINES:
        if type(config) in engine.CONFIGS:
            return engine
    raise TypeError(f"config must be one of {', '.join(config_classes())}, but got {config!r} of type {type(config).__name__}")


def config_classes() -> dict[str, type[Config]]:
    """The classes of all engines' configurations, by name."""
    return {cls.__name__: cls for engine in ENGINES for cls in engine.CONFIGS}


def config_from_table(name: str, values: Mapping[str, Any]) -> Config:
    """The configuration of that name, of which a table has the fields.

    Raises
    ------
    GoneError
        No engine has such configurations, or with such fields.
    ValueError
        A field does not take its value.
    """
    if name not in config_classes():
        raise GoneError(f"there is no engine of {name}")
    return config_classes()[name].from_table(values)


def uses_tensor_cores(config: Config) -> bool:
    """Whether `config` multiplies on tensor cores, and so is fast in either layout."""
    return engine_of(config).TENSOR_CORES


def reads_c_order(config: Config) -> bool:
    """Whether its engine also takes arrays in C order, or only channels last."""
    return not {"NCHW", "CNHW"}.isdisjoint(engine_of(config).LAYOUTS)


def refusal(problem: ConvProblem, config: Config, device: Device) -> str | None:
    """Why `config` can't run `problem` on `device`, or None if it can."""
    engine, launched = engine_of(config), problem.launched
    return unfit(engine, launched) or engine.unsupported(device) or unsupported_by(config, device) or engine.refusal(launched, config)


def unfit(engine: Engine, launched: ConvProblem) -> str | None:
    """Why an engine takes no arrays that lie as a problem's, or no images that are adapted so; None if it does."""
    if launched.layout not in engine.LAYOUTS:
        return f"it takes arrays in the layouts {', '.join(engine.LAYOUTS)}, not in {launched.layout}"
    if launched.adapted and not adapts(engine, launched):
        return "it takes no upsampled images" if launched.upsampled else "it takes no borders but zeros, and no integers"
    return None


def adapts(engine: Engine, launched: ConvProblem) -> bool:
    """Whether an engine may run a problem that is :attr:`ConvProblem.adapted`."""
    return bool((engine.upsamples if launched.upsampled else engine.adapts)(launched))


def choose(problem: ConvProblem, device: Device) -> Config:
    """The configuration that should be the fastest for `problem` on `device`.

    Raises
    ------
    ConvArgumentError
        No engine can run it. direct_gemm runs every problem that fits a launch.
    """
    config = find(problem, device)
    if config is None:
        raise ConvArgumentError(f"{problem} is too large for one launch of at most {GRID_LIMIT:,} blocks; convolve fewer images at a time")
    return config


#: Choices by problem, by what engines ask of a device, and by the engines: a channels-last call asks several times.
_found: dict[tuple[Any, ...], Config | None] = {}
MOST_FOUND = 1024


def _asked_of(device: Device) -> tuple[Any, ...]:
    """What engines ask of a device, and the engines."""
    return device.backend, device.capability, device.multiprocessors, type(device), ENGINES


def find(problem: ConvProblem, device: Device) -> Config | None:
    """:func:`choose`, but None if no engine can run it, as most channels-last wgrad problems."""
    return kept(_found, (problem, *_asked_of(device)), lambda: _fastest(problem, device))


def kept(table: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """What a table has under a key, or what is made then; a full table is emptied."""
    try:
        return table[key]
    except KeyError:
        if len(table) >= MOST_FOUND:
            table.clear()
        found = table[key] = make()
        return found


def _fastest(problem: ConvProblem, device: Device) -> Config | None:
    return next(iter(_in_order_of_layer(problem, device)), None) if problem.batch_invariant else _quickest(problem, device)


def _quickest(problem: ConvProblem, device: Device) -> Config | None:
    """The configuration that should be the fastest for these images, whatever the order of its sums."""
    found = []
    for engine in _engines(device, problem):
        one = engine.choose(problem.launched, device)
        if one:
            found.append(one)
            if one[0] == BY_RULE:
                return one[1]  # no prediction is shorter
    known = calibration.of(device)
    best = fastest(found) if known is None else _calibrated(found, problem.launched, device, known)
    return None if best is None else best[1]


#: Numbers of images by whose configurations the order of a batch-invariant layer's sums is chosen. It has to be possible for all whose
#: arrays are of ordinary size, and should take little time for the first ones.
BATCHES = 8, 64, 1


def _in_order_of_layer(problem: ConvProblem, device: Device) -> list[Config]:
    """The configurations of a batch-invariant problem, the fastest first: those that sum in the order that the layer has for any batch."""
    layer = replace(problem, N=1, batched=True, bare=False)
    order, known = kept(_orders, (layer, *_asked_of(device)), lambda: _order_of_layer(layer, device))
    found = [] if order is None else [config for _, config in _in_order(problem, order, known, device)]
    if not found:  # the batch may be too large for the layer's kernels
        parts = (engine.choose(problem.launched, device) for engine in _engines(device, problem) if engine.IN_PARTS)
        return [one[1] for one in parts if one]
    return found


#: By layer and by what engines ask of a device: the order, and the configurations in that order that batches of BATCHES would choose.
_orders: dict[tuple[Any, ...], tuple[Hashable, list[Config]]] = {}


def _order_of_layer(layer: ConvProblem, device: Device) -> tuple[Hashable, list[Config]]:
    """The order of sums that takes the least time for :data:`BATCHES`, among those of these batches' fastest configurations."""
    batches = [replace(layer, N=n) for n in BATCHES if n == 1 or replace(layer, N=n).largest_array < 2**31]
    wanted: dict[Hashable, dict[Config, None]] = {}
    for one in batches:
        config = _quickest(one, device)
        if config is not None:
            wanted.setdefault(order(one, config), {})[config] = None
    best: tuple[float, Hashable, list[Config]] = math.inf, None, []
    # where a transform is chosen, a measured rule says that sums take longer, whatever their models say
    by_rule = {found: configs for found, configs in wanted.items() if found[0] in TRANSFORMS}  # type: ignore[index]
    for found, configs in (by_rule or wanted).items():
        times = [_in_order(one, found, configs, device) for one in batches]
        if all(times):
            took = math.prod(max(timed[0][0], 1.0) for timed in times if timed is not times[-1] or len(times) == 1)
            best = min(best, (took, found, [timed[0][1] for timed in times]), key=lambda triple: triple[0])
    if best[1] is None:  # each of them serves some batches alone
        others = dict.fromkeys(order(batches[0], config) for _, config in predictions(batches[0], device))
        unmodelled = dict.fromkeys(order(batches[0], config) for us, config in _compared(batches[0], device) if us is None)
        possible = (found for found in (others | unmodelled) if all(_in_order(one, found, (), device) for one in batches))
        best = math.inf, next(possible, None), []
    return best[1:]


def _in_order(problem: ConvProblem, wanted: Any, more: Iterable[Config], device: Device) -> list[tuple[float, Config]]:
    """The configurations that sum in this :func:`order`, of those that `problem` would be measured with and of `more`, the fastest first.

    Each comes with the microseconds that it should take.
    """
    engine, sums = wanted
    known, launched = legal(engine, problem.launched, device, more), problem.launched
    alike = [one for one in known if engine.sum_order(launched, one) == sums]
    return sorted(((predicted(problem, one, device) or 0.0, one) for one in alike), key=lambda pair: pair[0])


def legal(engine: Engine, launched: ConvProblem, device: Device, more: Iterable[Config] = ()) -> list[Config]:
    """An engine's choice, the configurations that it compares, and `more`, as far as they can run a problem."""
    choice = engine.choose(launched, device)
    known = dict.fromkeys([*([choice[1]] if choice else []), *engine.configs(launched, device), *more])
    return [one for one in known if engine.refusal(launched, one) is None]


def predicted(problem: ConvProblem, config: Config, device: Device) -> float | None:
    """Microseconds that `config` should take, or None where no model knows."""
    engine = engine_of(config)
    us = engine.time(problem.launched, config, device)
    return us and us * _factor(engine, problem.launched, device, config)


def predictions(problem: ConvProblem, device: Device) -> list[tuple[float, Config]]:
    """The microseconds that every configuration with a model should take, the fastest first."""
    return sorted(((us, config) for us, config in _compared(problem, device) if us is not None), key=lambda pair: pair[0])


def candidates(problem: ConvProblem, device: Device) -> list[Config]:
    """The configurations that are worth measuring for `problem`, the planner's own choice first.

    They are those with predictions near the shortest, the :data:`BEST` of every engine, and all without a model.
    """
    if problem.batch_invariant:
        return _in_order_of_layer(problem, device)[:MOST_NEAR]
    compared = _compared(problem, device)
    modelled = sorted(((us, config) for us, config in compared if us is not None), key=lambda pair: pair[0])
    near = [config for us, config in modelled if us <= NEAR * modelled[0][0]][:MOST_NEAR]
    of_engines: dict[Engine, list[Config]] = {}
    for _, config in modelled:
        of_engines.setdefault(engine_of(config), []).append(config)
    best = (config for found in of_engines.values() for config in found[:BEST])
    return list(dict.fromkeys([choose(problem, device), *near, *best, *(config for us, config in compared if us is None)]))


def alternatives(problem: ConvProblem, config: Config, device: Device, others: Iterable[Config] = ()) -> list[Config]:
    """Other configurations that give the same bits as `config`, the fastest first: those of its engine, and any of `others`."""
    engine, launched = engine_of(config), problem.launched
    known = dict.fromkeys([*engine.configs(launched, device), *others])
    return fastest_first(problem, (one for one in same_bits(problem, config, known) if one != config), device)


def fastest_first(problem: ConvProblem, configs: Iterable[Config], device: Device) -> list[Config]:
    """`configs` by the microseconds that they should take; those without a model come first."""
    return sorted(configs, key=lambda one: predicted(problem, one, device) or 0.0)


def order(problem: ConvProblem, config: Config) -> Hashable:
    """Equal for configurations that give the same bits."""
    engine = engine_of(config)
    return engine, engine.sum_order(problem.launched, config)


def same_bits(problem: ConvProblem, config: Config, others: Iterable[Config]) -> Iterator[Config]:
    """The configurations of `others` that can run `problem` and give the same bits as `config`."""
    engine, launched = engine_of(config), problem.launched
    order = engine.sum_order(launched, config)
    for one in others:
        if type(one) in engine.CONFIGS and engine.refusal(launched, one) is None and engine.sum_order(launched, one) == order:
            yield one


def schedule(
    problem: ConvProblem, config: Config, device: Device, with_moments: bool = False, source: ConvProblem | None = None
) -> Schedule:
    """The launches of `config` for `problem` on `device`; a ``ValueError`` if it can't run it.

    With `with_moments` they compute the moments of the result, if they can: see :attr:`Schedule.moments`. With `source`, whose
    :attr:`ConvProblem.padded` the problem is, they read its image: see :func:`adds_border`.
    """
    reason = refusal(problem, config, device)
    if reason:
        raise ValueError(f"{config} can't run {problem}: {reason}")
    return engine_of(config).schedule(problem.launched, config, device, with_moments, *([source] if source else []))


def adds_border(source: ConvProblem, config: Config) -> bool:
    """Whether the launches of `config` for the :attr:`ConvProblem.padded` of `source` can read the image of `source` itself.

    Engines are asked about borders of the image's own pixels, no further than to its other end.
    """
    if source.border is None or source.input_dtype or near_sides(source) is None:
        return False
    problem = source.padded
    return problem == problem.launched and engine_of(config).adds_border(source, problem, config)


def with_moments(problem: ConvProblem, config: Config, device: Device) -> Config:
    """The configuration to take instead of `config`, the fastest, when the moments of the result are wanted as well.

    A configuration that computes the moments beside the result is taken if, by the models, it is faster than `config` followed by a
    pass that reads the result. Else it is `config`.
    """
    fastest_us = predicted(problem, config, device)
    if problem.batch_invariant or fastest_us is None or schedule(problem, config, device, True).moments is not None:
        return config
    pass_us = COST.PASS_LAUNCH + problem.itemsize * math.prod(problem.result_shape) / MEMORY
    for us, other in predictions(problem, device):
        if us >= fastest_us + pass_us:
            break
        if uses_tensor_cores(other) and schedule(problem, other, device, True).moments is not None:
            return other
    return config


def variants(device: Device) -> list[VariantSet]:
    """All texts of kernels that `device` may be asked for: a closed list, except for engines whose texts have their layer's numbers."""
    packed = packing.variants(device) if device.backend == "cuda" else ()
    own = [family for engine in ENGINES if engine.unsupported(device) is None for family in engine.variants(device)]
    return [*own, *split_sum.variants(device), *packed]


def filter_key(problem: ConvProblem, config: Config) -> Hashable:
    """Equal for plans that pack a filter alike, whatever their images; None if the filter is read as it is."""
    key = engine_of(config).filter_key(problem.launched, config)
    return key and (key, problem.batch_invariant)


def _engines(device: Device, problem: ConvProblem) -> list[Engine]:
    """The engines that may run `problem`: of those that its algorithm names, or of all if none of these can."""
    launched = problem.launched
    asked = [engine for engine in ENGINES if launched.layout in engine.LAYOUTS and (not launched.adapted or adapts(engine, launched))]
    found = [engine for engine in asked if engine.worthwhile(launched, device) and engine.unsupported(device) is None]
    if launched.adapted:
        return found
    if problem.algorithm == "fft":
        transform = [engine for engine in found if engine in TRANSFORMS and any(True for _ in engine.configs(launched, device))]
        return transform or [engine for engine in found if engine not in TRANSFORMS]
    if problem.batch_invariant:
        return [engine for engine in found if engine not in TRANSFORMS or engine.BY_IMAGE]
    return [engine for engine in found if problem.algorithm is None or engine not in TRANSFORMS]


def _compared(problem: ConvProblem, device: Device) -> list[tuple[float | None, Config]]:
    """Every configuration worth comparing with the microseconds it should take; None without a model."""
    launched, found = problem.launched, list[tuple[float | None, Config]]()
    for engine in _engines(device, problem):
        for config in engine.configs(launched, device):
            if engine.refusal(launched, config) is None:
                us = engine.time(launched, config, device)
                found.append((us and us * _factor(engine, launched, device, config), config))
    return found


def _calibrated(
    found: Sequence[tuple[float, Config]], launched: ConvProblem, device: Device, known: calibration.Calibration
) -> tuple[float, Config] | None:
    """The fastest of the engines' choices by what timings of such a GPU say of them, or of the tiles of those that are nearly as fast."""
    timed = []
    for us, config in found:
        engine = engine_of(config)
        modelled = engine.time(launched, config, device)
        ruled = modelled is None or not math.isclose(us, modelled)  # then a rule has decided, not the model
        timed.append((us if ruled else us * known.factor(name_of(engine), launched), config, None if ruled else engine))
    least = min((us for us, *_ in timed), default=math.inf)
    best = fastest((us, config) for us, config, model in timed if model is None)
    for us, config, model in timed:
        if model is not None and us <= CLOSE * least:
            name, kinds = name_of(model), None
            for one in dict.fromkeys([config, *model.configs(launched, device)]):
                predicted = model.time(launched, one, device) if model.refusal(launched, one) is None else None
                if predicted is not None:
                    kinds = kinds or calibration.kinds(name, launched)
                    predicted *= known.of_kinds(kinds, one)
                    if best is None or predicted < best[0]:
                        best = predicted, one
    return best


def _factor(engine: Any, launched: ConvProblem, device: Device, config: Config) -> float:
    """By what timings of such a GPU say that an engine's predictions for such problems have to be multiplied."""
    known = calibration.of(device)
    return 1.0 if known is None else known.factor(name_of(engine), launched, config)


def name_of(engine: Any) -> str:
    """An engine's name in files: its module's without the package's."""
    return str(engine.__name__).removeprefix("pycuda_conv.engines.")
