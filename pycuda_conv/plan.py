"""How a problem is computed: the kernel and tile for it, compiled, and the launches that run it."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pycuda_conv import background, engines, execute, repeat
from pycuda_conv.arrays import same_kind
from pycuda_conv.call import Operands
from pycuda_conv.elements import bytes_of
from pycuda_conv.engines.schedule import Schedule
from pycuda_conv.errors import BackendError, brief
from pycuda_conv.explain import explain
from pycuda_conv.memo import forget_launches, forget_plans, remember_plans
from pycuda_conv.problem import ConvProblem, channels_last
from pycuda_conv.repeat import RepeatTable
from pycuda_conv.runtime import Device, contexts, get_device
from pycuda_conv.runtime.compiler import CompileError
from pycuda_conv.tune import Choice, lookup, tuned
from pycuda_conv.typing import Array

if TYPE_CHECKING:
    from pycuda_conv.kernels import Kernel

contexts.when_forgotten.append(forget_plans)

#: What a plan has launchers for: to pack the filter; and to compute with it packed, as it is, or in :attr:`Plan.filter_order`.
PACK, WITH_PACKED, WHOLE, FILTER_LAST = range(4)


class Plan:
    """One problem, ready to run on one device: make it once, call it many times.

    Parameters
    ----------
    problem : ConvProblem
    device : None, int, str or Device
        See :func:`pycuda_conv.runtime.get_device`.
    config : optional
        One of the configurations in :mod:`pycuda_conv.engines`; by default the one that was measured to be the fastest for
        the problem on such a GPU (see :mod:`pycuda_conv.tune`), or else the one that the engines' models predict to be.
    tune : bool
        Measure a problem that has not been measured, which takes seconds, and keep what is found for later plans and processes.
        On OpenCL nothing is measured.
    with_moments : bool
        Compute the moments of the result's channels beside the result, in the workspace, if the kernels can: see
        :class:`pycuda_conv.engines.schedule.Moments`. It serves work that continues with the moments in the same workspace.
    noted : bool, optional
        The former name of `with_moments`, which warns.

    Raises
    ------
    TypeError
        A `problem` that is no :class:`ConvProblem`, or a `config` that is no configuration.
    ValueError
        A configuration that can't run the problem, or one to tune; a problem to measure while a stream is being captured.

    Notes
    -----
    A plan can be pickled and copied, so it goes to worker processes. There it needs a device of the same name and, if that is a GPU,
    of the same model; else a ``BackendError`` says what is different.

    Examples
    --------
    >>> import numpy as np, pycuda_conv as pc
    >>> x, w = np.random.rand(8, 16, 32, 32).astype("f"), np.random.rand(24, 16, 3, 3).astype("f")
    >>> plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape, padding=1))
    >>> plan(x, w).shape
    (8, 24, 32, 32)
    """

    def __init__(
        self, problem: ConvProblem, device: Any = None, *, config: engines.Config | None = None, tune: bool = False,
        with_moments: bool = False, noted: bool | None = None,
    ) -> None:
        if not isinstance(problem, ConvProblem):
            raise TypeError(f"problem must be a ConvProblem, as ConvProblem.forward makes it, got {brief(problem)}")
        if not isinstance(config, engines.Config | None):
            raise TypeError(f"config must be one of the configurations in pycuda_conv.engines, or None, got {brief(config)}")
        if not isinstance(tune, bool):
            raise TypeError(f"tune must be True or False, got {brief(tune)}")
        if noted is not None:
            warnings.warn("noted= is called with_moments=", DeprecationWarning, stacklevel=2)
            with_moments = noted
        self.problem = problem
        self.device = get_device(device)
        #: whether the caller chose the configuration
        self.fixed = config is not None
        if self.fixed and tune:
            raise ValueError(f"there is nothing to tune: config={config} was given")
        #: the measurement that the configuration follows, or None
        self.tuned = None if self.fixed else (tuned if tune else lookup)(problem, self.device)
        if config is None:
            config = self.tuned.config if self.tuned else engines.choose(problem, self.device)
            if with_moments:
                config = engines.with_moments(problem, config, self.device)
        self._set_up(config, with_moments)
        if tune:
            self.specialise()

    def _set_up(self, config: engines.Config, with_moments: bool, schedule: Schedule | None = None) -> None:
        """Make the plan's launches by `config`, or take `schedule`, which `config` made before."""
        problem = self.problem
        self.config = config
        self.with_moments = with_moments
        self.schedule = schedule = schedule or engines.schedule(problem, config, self.device, with_moments)
        #: bytes of the packed filter; 0 where the kernels read the filter as it is
        self.filter_bytes = schedule.filter_bytes
        #: equal for plans whose packed filters are interchangeable
        self.filter_key = engines.filter_key(problem, self.config)
        #: bytes of workspace for a call that packs the filter itself
        self.workspace_bytes = schedule.workspace_bytes + schedule.filter_bytes
        self.empty = 0 in problem.result_shape
        known = background.initial_form(schedule, self.device)
        self._load(known)
        #: the plan of a better configuration for the same problem, made in the background: the next call should take it
        self.better: Plan | None = None
        self._better_config: engines.Config | None = None
        self._background: background.BackgroundCompile | None = None
        #: where calls of this plan are remembered: tables, by their identities, and keys. A table dies with its owner, a bound filter say
        self._repeated: dict[int, tuple[weakref.ref[RepeatTable], set[Any]]] = {}
        if background.has_constants(known):
            self._await_constants()
        #: whether the kernels can read a filter whose axes lie in memory in :attr:`filter_order`, None being C order
        self.reads_filter_last = bool(schedule.filter_last) and not (self.empty or problem.bare) and problem.direction != "wgrad"
        #: the same for a filter that is written: the gradient
        self.writes_filter_last = bool(schedule.filter_last) and not self.empty and problem.direction == "wgrad"
        either = math.prod(problem.filter_size) == 1 or problem.bare  # a filter of one tap, or of one channel, lies in either order
        self.filter_order = None if either else channels_last(problem.ndim + 2, problem.ndim)
        # asked for on every call
        self.order, self.weight_order, self.result_order = problem.order, problem.weight_order, problem.result_order
        self.result_shape = problem.result_shape
        self.result_bytes = math.prod(self.result_shape) * problem.result_itemsize
        #: the dtype of results; None where it is that of the input
        self.new_dtype = (problem.result_dtype or problem.dtype) if problem.input_dtype or problem.result_dtype else None
        #: bytes of input, weight, bias, scale and residual
        operands = zip(problem.operand_shapes, problem.operand_dtypes, strict=True)
        self.operand_bytes = tuple(math.prod(shape or (0,)) * bytes_of(dtype) for shape, dtype in operands)
        #: whether the kernels take arrays by address alone, without tensor maps
        self.by_address = not any(launch.maps for launch in background.launches(schedule))
        #: whether a residual must not be the result's own memory
        self.redoes = schedule.redoes

    def _load(self, schedule: Schedule) -> None:
        """Compile the kernels, or find them compiled, and make launchers of them."""
        #: the form of :attr:`schedule` whose kernels serve
        self.loaded = schedule
        steps = schedule.prepare, schedule.steps, schedule.whole, schedule.filter_last or []
        if self.empty:
            steps = [], [], [], []
        self.device.compile_all([launch for part in steps for step in part for launch in step])
        # launchers are made at their first use, which may never come, except for the one that most calls use
        self._ways = [partial(self.device.schedule_launcher, part) for part in steps]
        self._launchers: list[Any] = [None, None, self._ways[WHOLE](), None]
        #: repeated calls of this plan: keys, and what the launcher in C takes
        self.made_before = RepeatTable(of_plan=True)

    @classmethod
    def _at_once(cls, problem: ConvProblem, device: Device, with_moments: bool) -> Plan:
        """A plan that does not wait for the compiler if compiled kernels can serve it.

        Then its configuration is not the best one: that is compiled in the background, for :attr:`better`. If a call has to wait for the
        compiler, it waits as short as possible, and the compiler also makes kernels that may be asked for next.
        """
        self = cls.__new__(cls)
        self.problem, self.device, self.fixed, self.tuned = problem, device, False, lookup(problem, device)
        config = self.tuned.config if self.tuned else engines.choose(problem, device)
        if with_moments:
            config = engines.with_moments(problem, config, device)
        schedules = {} if with_moments else {config: engines.schedule(problem, config, device)}
        missing = []
        if not (with_moments or 0 in problem.result_shape):
            missing = background.missing(background.initial_form(schedules[config], device), device)
        serves = config
        if missing:
            substitute = background.same_bits_substitute(problem, config, device, schedules)
            serves = substitute or background.fastest_to_compile(problem, config, device)
            if serves not in schedules:
                schedules[serves] = engines.schedule(problem, serves, device)
            waited_for = background.missing(background.initial_form(schedules[serves], device), device)
            if waited_for and background.foresees(device):
                background.foresee(problem, waited_for, device)
        try:
            self._set_up(serves, with_moments, schedules.get(serves))
        except CompileError as error:
            resort = None if with_moments else background.last_resort(problem, device)
            if resort is None:
                raise
            background.log_once(error)
            self._set_up(resort, with_moments)
        else:
            if serves != config:
                self._better_config, self._background = config, background.BackgroundCompile(device, missing, tell=self._forget_repeated)
        background.configs_used[self.config] = None
        return self

    def _await_constants(self) -> None:
        """Count calls of general kernels: after several, kernels with the layer's constants are compiled."""
        if not self.empty and background.enabled() and self.device.constants_pay and background.has_constants(self.schedule):
            kernels = background.launches(background.with_constants(self.schedule))
            self._background = background.BackgroundCompile(self.device, kernels, background.OFTEN, self._forget_repeated)

    def _improve(self, coming: background.BackgroundCompile, stream: Any) -> None:
        """Take the kernels that were compiled in the background, if they are ready."""
        done = True
        try:
            done = coming.ready(stream)
            if done and self._better_config is not None:
                self._make_better(self._better_config)
            elif done:
                self._load(background.with_constants(self.schedule))
        except Exception as error:  # the kernels that serve go on serving
            background.log_once(error)
        finally:
            if done:
                self._background = None
                self._forget_repeated()

    def _make_better(self, config: engines.Config) -> None:
        better = type(self).__new__(type(self))
        better.problem, better.device, better.fixed, better.tuned = self.problem, self.device, self.fixed, self.tuned
        better._set_up(config, self.with_moments)
        self.better = better
        self._forget_repeated()

    def on(self, device: Any) -> Plan:
        """The same plan for another context of the same GPU: its kernels are loaded there, and nothing is planned again."""
        found: Plan | None = device.plans.get(self)
        if found is None:
            found = type(self).__new__(type(self))
            found.problem, found.device, found.fixed, found.tuned = self.problem, device, self.fixed, self.tuned
            found._set_up(self.config, self.with_moments, self.schedule)
            device.plans[self] = found
        return found

    def final_form(self) -> Plan:
        """The plan in its final form: the best configuration, on a GPU with the layer's constants compiled in. Waits for the compiler."""
        if self._better_config is not None and self.better is None:
            self._make_better(self._better_config)
            self._background = None
        plan = self.better or self
        if plan.device.constants_pay:
            plan.specialise()
        return plan

    def settled(self) -> Plan:
        """The former name of :meth:`final_form`, which warns."""
        warnings.warn("Plan.settled() is called final_form()", DeprecationWarning, stacklevel=2)
        return self.final_form()

    def specialise(self) -> None:
        """Compile the layer's constants into the kernels now, where that makes them faster. The results stay the same, bit by bit.

        On a GPU, kernels with these constants serve from the first call on, unless only general kernels were compiled then. In that case
        the other kernels are compiled in the background, after ten calls.
        """
        if not self.empty and background.enabled() and background.has_constants(self.schedule):
            self._load(background.with_constants(self.schedule))
            self._background = None
            self.made_before.clear()
            forget_launches()

    @property
    def settles(self) -> bool:
        """Whether later calls will launch the same kernels as the last one did."""
        return not self.empty and self._background is None and self.better is None

    @property
    def may_be_repeated(self) -> bool:
        """Whether a call may be repeated as the last one was made: not where better kernels are ready."""
        return not self.empty and self.better is None and (self._background is None or not self._background.is_done())

    def repeat_in(self, table: RepeatTable, name: Any) -> int:
        """Note where a call of this plan is remembered. Returns how often it may be repeated before Python makes it again; -1: any number.

        Better kernels that are compiled meanwhile end that: then the call is forgotten.
        """
        repeated, at = self._repeated, id(table)
        if at not in repeated:
            repeated[at] = weakref.ref(table, lambda _: repeated.pop(at, None)), set()
        repeated[at][1].add(name)
        coming = self._background
        return -1 if coming is None else 0 if coming.is_done() else coming.lend()

    def _forget_repeated(self) -> None:
        """Forget the calls that are remembered: there are better kernels."""
        repeated, self._repeated = self._repeated, {}
        for reference, names in list(repeated.values()):
            table = reference()
            for name in names if table is not None else ():
                table.pop(name, None)  # type: ignore[union-attr]

    def lays_filter_last(self, kind: Any, out: Any) -> bool:
        """Whether a gradient of a filter is written in :attr:`filter_order`: where the kernels can, unless `out` lies otherwise."""
        return self.writes_filter_last and (out is None or kind.is_laid_out_as(out, self.filter_order))

    def launcher(self, packed: bool, filter_last: bool) -> Any:
        """The launcher that :meth:`launch` calls: for a filter that is packed, one that lies in :attr:`filter_order`, or any other."""
        return self._launcher(WITH_PACKED if packed else FILTER_LAST if filter_last else WHOLE)

    def _launcher(self, way: int) -> Any:
        launchers = self._launchers
        if launchers[way] is None:
            launchers[way] = self._ways[way]()
        return launchers[way]

    def launch(self, buffers: Sequence[Any], stream: Any = None, packed: int = 0, filter_last: bool = False) -> None:
        """Launch the kernels on (input, weight, bias, scale, residual, result, workspace): addresses, 0 for none, or OpenCL buffers.

        The device must be current (``with plan.device:``) and `stream` one of the device's own. `packed` is the address of
        a filter that :meth:`pack` has packed; without one, filters that have to be are packed into the workspace. With
        `filter_last`, for plans of :attr:`reads_filter_last` or :attr:`writes_filter_last`, the filter, or its gradient, lies in
        :attr:`filter_order`. The residual may be the result's memory unless the plan :attr:`redoes` parts of that.
        """
        input, weight, bias, scale, residual, result, workspace = buffers
        place = packed or (workspace + self.schedule.workspace_bytes if self.filter_bytes else 0)
        self.device.check_current()
        self.launcher(bool(packed), filter_last)((input, weight, bias, result, workspace, place, scale, residual), stream)
        coming = self._background
        if coming is not None:
            self._improve(coming, stream)

    def pack(self, weight: int, packed: int, stream: Any = None) -> None:
        """Pack the filter at `weight` into the ``filter_bytes`` bytes at `packed`, for :meth:`launch`."""
        self.device.check_current()
        self._launcher(PACK)((0, weight, 0, 0, 0, packed, 0, 0), stream)

    def __call__(
        self, input: Array, weight: Array, bias: Array | None = None, *, scale: Array | None = None, residual: Array | None = None,
        out: Array | None = None, stream: Any = None,
    ) -> Array:
        """Convolve arrays of the problem's shapes and dtype; the arguments are those of :func:`pycuda_conv.conv2d`."""
        if stream is None:
            made: Array | None = repeat.call(self.made_before, (), False, input, weight, bias, scale, residual, out)
            if made is not None:
                return made
        result: Array = execute.call_plan(self, Operands(input, weight, bias, scale, residual), out, stream)
        return result

    def bind(self, weight: Any, bias: Any = None, scale: Any = None) -> BoundPlan:
        """This plan with a filter that stays on the device, for many inputs: see :class:`BoundPlan`."""
        return BoundPlan(self, weight, bias, scale)

    def kernels(
        self, input: Array, weight: Array, bias: Array | None = None, *, out: Array, scale: Array | None = None,
        residual: Array | None = None, workspace: Any = None,
    ) -> list[Kernel]:
        """The plan's launches on these arrays, to be made by hand: in a stream, a graph or a program of your own.

        ::

            for k in plan.kernels(x, w, out=y):
                k.function(*k.args, grid=k.grid, block=k.block, shared=k.shared, stream=stream)

        Parameters
        ----------
        input, weight, bias, scale, residual
            Arrays in the GPU's memory, of the plan's shapes and dtype. They must lie as the kernels read them: nothing is copied.
        out : array
            Where the result goes.
        workspace : array, allocation or int, optional
            At least :attr:`workspace_bytes` bytes of the GPU's memory, at a multiple of 256 bytes; by default new memory, which the
            launches keep. Launches that may run at the same time need workspaces of their own.

        Returns
        -------
        list of :class:`pycuda_conv.Kernel`
            In the order in which they have to run; empty for a result without elements. The functions belong to PyCUDA's current context.

        Raises
        ------
        ConvArgumentError, TypeError
            As for a call, and for an array that would have to be copied.
        BackendError
            The plan is not for a GPU.
        """
        from pycuda_conv.kernels import of_plan

        return of_plan(self, Operands(input, weight, bias, scale, residual), out, workspace)

    def explain(self, measure: bool = False) -> str:
        """A text with what is launched and why: the work, the configuration and the reasons for it, each launch, the time.

        Parameters
        ----------
        measure : bool
            Measure the time now, on random arrays.
        """
        return explain(self, measure)

    def __reduce__(self) -> tuple[Any, ...]:
        made_of = self.problem, self.device.name, self.device.model, self.config, self.with_moments, self.fixed, self.tuned
        return _plan_again, made_of

    def __repr__(self) -> str:
        return f"<Plan {self.problem} on {self.device.name}: {self.config}>"


def _plan_again(
    problem: ConvProblem, name: str, model: str, config: engines.Config, with_moments: bool, fixed: bool = True, tuned: Choice | None = None
) -> Plan:
    """A plan that was pickled. One whose kernels are no more is planned anew."""
    device = get_device(name)
    if device.model != model:
        raise BackendError(
            f"this plan was made for {name}, an {model}, but here {name} is an {device.model}: pickle the plan's problem instead, and "
            "make a plan of it with pycuda_conv.Plan(problem)"
        )
    config = engines.config_again(type(config).__name__, vars(config))  # an older version may have written it with other fields
    if isinstance(config, engines.Gone) or engines.refusal(problem, config, device) is not None:
        return Plan(problem, device, with_moments=with_moments)
    made = Plan(problem, device, config=config, with_moments=with_moments)
    made.fixed, made.tuned = fixed, tuned
    return made


class BoundPlan:
    """A plan and its filter. Made by :meth:`Plan.bind`.

    A filter in host memory is copied to the device once, when this is made, and so is one that the plan's kernels take packed
    (:attr:`Plan.filter_bytes`): what the caller writes to its array later makes no difference. Any other filter on the
    device, and a bias or a scale there, is kept, not copied: calls read what the caller's memory holds then.

    The packed filter is ready when this is made, for calls on any stream. It is memory of the stream that was current then:
    wait for calls on other streams before you drop the last reference.

    It can be pickled and copied as a :class:`Plan` can, with the filter that it has then.

    Parameters
    ----------
    plan : Plan
    weight, bias, scale : arrays of the plan's shapes
        Of the kind that the inputs will be.

    Examples
    --------
    >>> import numpy as np, pycuda_conv as pc
    >>> w = np.random.rand(24, 16, 3, 3).astype("f")
    >>> layer = pc.Plan(pc.ConvProblem.forward(2, (8, 16, 32, 32), w.shape, padding=1)).bind(w)
    >>> layer(np.random.rand(8, 16, 32, 32).astype("f")).shape
    (8, 24, 32, 32)
    """

    def __init__(self, plan: Plan, weight: Any, bias: Any = None, scale: Any = None) -> None:
        given = Operands(weight, weight, bias, scale)
        self._kind = kind = same_kind(given, names=("weight", "weight"))
        kind.check_dense(weight, bias, scale)
        kind.check_not_recorded(given)
        given = kind.imported(given, ("weight", "weight"))
        _, weight, bias, scale, _ = given
        _, of_weight, *_ = signatures = kind.signatures(given)
        assert of_weight is not None
        self.plan = plan = execute.in_context_of(plan, of_weight)
        #: of weight, bias and scale
        self._signatures = signatures[1:4]
        input, *_, residual = (None if shape is None else (shape, *of_weight[1:]) for shape in plan.problem.operand_shapes)
        if plan.problem.input_dtype and input is not None:
            input = input[0], kind.dtype_of(plan.problem.input_dtype), input[2]
        execute.check_fit(plan, kind, (input, *self._signatures, residual))  # the others will be checked when they come
        self._filter, self._kept = execute.keep(kind, plan, weight, bias, scale)
        #: calls that were made before
        self._made_before = RepeatTable(of_plan=True)

    def __repr__(self) -> str:
        return f"<BoundPlan of {self.plan!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _bound_again, (self.plan, type(self._kind), *(a if a is None else self._kind.to_pickle(a) for a in self._filter))

    def __call__(self, input: Array, *, residual: Array | None = None, out: Array | None = None, stream: Any = None) -> Array:
        """Convolve one input; the arguments are those of :func:`pycuda_conv.conv2d`."""
        filter = self._filter
        if stream is None:
            made: Array | None = repeat.call(self._made_before, (), False, input, *filter, residual, out)
            if made is not None:
                return made
        given = Operands(input, input, residual=residual)
        kind = same_kind(given, out)
        if kind is not self._kind:
            raise TypeError(f"input is a {kind.name} but the filter is a {self._kind.name}; pass arrays of one kind")
        kind.check_not_recorded(given)
        given = kind.imported(given, ("input", "input"))
        of_input, *_, of_residual = kind.signatures(given)
        execute.check_fit(self.plan, kind, (of_input, *self._signatures, of_residual))
        operands = Operands(given.input, *filter, given.residual)
        result: Array = execute.run(kind, self.plan, operands, out, stream, kept=self._kept)
        if stream is None:
            repeat.remember(self._made_before, (), kind, self.plan, operands, out, packed=self._kept)
        return kind.exported(result, operands, stream)


def _bound_again(plan: Plan, kind: Any, *pickled: Any) -> BoundPlan:
    """A bound plan that was pickled."""
    with plan.device:
        arrays = [a if a is None else kind.from_pickle(a, plan.device) for a in pickled]
    return BoundPlan(plan, *arrays)


@remember_plans
def cached_plan(problem: ConvProblem, device: Device, tune: bool = False, with_moments: bool = False) -> Plan:
    """The plan for `problem`, made at its first use. ``cached_plan.cache_info()`` and ``.cache_clear()`` serve the curious."""
    if tune or not background.enabled():
        return Plan(problem, device, tune=tune, with_moments=with_moments)
    return Plan._at_once(problem, device, with_moments)


def reads_channels_last(problem: ConvProblem, device: Device, tune: bool = False) -> bool:
    """Whether arrays that are channels last, as in `problem`, are best convolved as they lie, on a GPU.

    Some engines read either order, some NCHW alone, some channels last alone. Nothing is compiled, and with `tune` nothing is measured
    that can't be the answer.
    """
    if problem.batch_invariant:  # then the layer decides, for any number of images
        problem = replace(problem, N=engines.BATCHES[0], batched=True)
    return _pays(problem, device, lookup(problem, device)) and (not tune or _pays(problem, device, tuned(problem, device)))


def as_called(problem: ConvProblem, device: Device, tune: bool = False) -> ConvProblem:
    """The problem that a call plans for `problem` on a GPU's arrays: those that are channels last may be put in order first."""
    converted = problem.layout == "NHWC" and not reads_channels_last(problem, device, tune)
    return replace(problem, layout="NCHW") if converted else problem


#: Taps from which on other kernels of arrays in NCHW, or their Fourier transforms, may be worth the conversion: fewer have unrolled loops.
MANY_TAPS = 50


def _pays(problem: ConvProblem, device: Device, found: Choice | None) -> bool:
    if problem.C == problem.K == 1:  # see ConvProblem.launched
        return True
    if problem.adapted:  # a border is copied in either layout
        problem, found = problem.padded, None
    config = found.config if found else engines.find(problem, device)
    if config is None or not engines.reads_c_order(config):
        return config is not None and (math.prod(problem.filter_size) < MANY_TAPS or _gains(problem, device, found))
    if not engines.uses_tensor_cores(config):
        return _gains(problem, device, found)
    converted = _converted_time(problem, device)
    chosen = found.us if found else engines.predicted(problem, config, device)  # others may be predicted to be faster yet
    if (chosen is not None and chosen <= converted) or engines.uses_tensor_cores(engines.choose(replace(problem, layout="NCHW"), device)):
        return True
    predicted = (us for us, config in engines.predictions(problem, device) if engines.uses_tensor_cores(config))
    return (found.us if found else next(predicted)) <= converted or _gains(problem, device, found)


def _gains(problem: ConvProblem, device: Device, found: Choice | None) -> bool:
    """Whether `problem` takes less time from arrays as they lie than with its images converted to NCHW before, or back.

    10 us for the launches that convert; an H200 moves 3 MB a microsecond, there and back.
    """
    in_place, transposed = (engines.predictions(one, device) for one in (problem, replace(problem, layout="NCHW")))
    return (found.us if found else in_place[0][0]) <= transposed[0][0] + 10 + _converted_bytes(problem) / 3e6 * 132 / device.multiprocessors


def _converted_time(problem: ConvProblem, device: Device) -> float:
    """Roughly the microseconds of a direct kernel with its input converted to NCHW before and its result converted back after.

    15 for the launches, the host's share included; an H200 makes 8 million MACs a microsecond and moves 3 MB, there and back.
    """
    return 15 + (problem.macs / 8e6 + _converted_bytes(problem) / 3e6) * 132 / device.multiprocessors


def _converted_bytes(problem: ConvProblem) -> int:
    """Bytes that are read and written where images are converted: both operands of the gradient of a filter, which has no images itself."""
    other = problem.weight_shape if problem.direction == "wgrad" else problem.result_shape
    return 2 * (math.prod(problem.input_shape) + math.prod(other)) * problem.itemsize
