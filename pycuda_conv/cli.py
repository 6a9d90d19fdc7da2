"""The command ``pycuda-conv``. Its exit status is 0 if all is fine, 1 if something is wrong, 2 if it can't be done."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pycuda_conv
from pycuda_conv import interrupt
from pycuda_conv.arguments import ACTIVATIONS, ALGORITHMS, PADDINGS, checked_activation
from pycuda_conv.errors import BackendError, ConvArgumentError, VariableError, did_you_mean
from pycuda_conv.interrupt import INTERRUPTED
from pycuda_conv.runtime import named_place
from pycuda_conv.tools import streams
from pycuda_conv.tools.suite import KINDS, MODES
from pycuda_conv.tools.terminal import OK, UNUSABLE, ToolError
from pycuda_conv.tools.wording import in_options, with_suggestion

#: Seconds that a command may take to end before a line says what it waits for.
PATIENCE = 0.7


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line instead of the usage and a line."""
        self.exit(UNUSABLE, f"{self.prog}: {with_suggestion(message, self._known())} (--help tells more)\n")

    def _known(self) -> list[str]:
        """All options of this command and of its subcommands."""
        below = [one for action in self._actions if isinstance(action.choices, dict) for one in action.choices.values()]
        return [option for one in (self, *below) for action in one._actions for option in action.option_strings]


class _Help(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Leave the lines of examples as they are."""
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


#: What each command's help shows at its end.
EXAMPLES = {
    "run": ("run --filter sharpen photo.jpg sharper.jpg", "run --filter w.npy --padding same scans results"),
    "info": ("info", "info --json > machine.json"),
    "verify": ("verify", "verify --device opencl --seed 1"),
    "bench": ("bench --quick --only 'k3x3 s1'", "bench --device opencl --json cpu.json"),
    "tune": ("tune --match 64x56x56 --limit 300", "tune --dtype float16 --layout NHWC"),
    "warm": ("warm --model resnet50 --mode fp16-nhwc --training", "warm --device opencl"),
    "kernels": ("kernels", "kernels opencl --list"),
}


def _device(text: str) -> Any:
    device = int(text) if text.isdecimal() else text
    try:
        named_place(device)
    except ConvArgumentError as error:
        hint = str(error).partition("; ")[2].replace("'", "")
        raise argparse.ArgumentTypeError(
            f"must be the number of a GPU, cuda, cuda:N, opencl or cpu, got {text!r}" + (f"; {hint}" if hint else "")
        ) from None
    return device


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


def _place(text: str) -> Path | str:
    """A path, which may also be written as an address of ``file`` or ``local``; any other address unchanged."""
    protocol, mark, rest = text.partition("://")
    return text if mark and protocol not in ("file", "local") else Path(rest if mark else text)


def _output(text: str) -> Path | str:
    """The same; a folder's name keeps the slash at its end."""
    place = _place(text)
    return f"{place}{os.sep}" if isinstance(place, Path) and text.endswith(("/", os.sep)) else place


def _axes(text: str) -> str:
    letters = text.lower()
    if not (letters.isascii() and letters.isalpha()) or len(set(letters)) < len(letters):
        raise argparse.ArgumentTypeError(f"must be a letter for each axis, as tczyx, each once, got {text!r}")
    return letters


def _sizes(text: str) -> Any:
    """``"2"`` as 2 and ``"1,2"`` as (1, 2)."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer or integers with commas between them, got {text!r}") from None
    return values[0] if len(values) == 1 else values


def _padding(text: str) -> Any:
    if text in ("same", "valid"):
        return text
    try:
        return _sizes(text)
    except argparse.ArgumentTypeError:
        hint = did_you_mean(text, PADDINGS).replace("'", "")
        raise argparse.ArgumentTypeError(f"must be same, valid, or integers with commas between them, got {text!r}{hint}") from None


def _activation(text: str) -> Any:
    """``"gelu"`` as it is, ``"leaky_relu:0.2"`` as ("leaky_relu", 0.2)."""
    word, colon, slope = text.partition(":")
    try:
        return checked_activation((word, float(slope)) if colon else word)
    except ValueError:
        words = ", ".join(str(one) for one in ACTIVATIONS[1:])
        hint = did_you_mean(word, ACTIVATIONS).replace("'", "")
        raise argparse.ArgumentTypeError(f"must be one of {words}, or leaky_relu:SLOPE, got {text!r}{hint}") from None


def _devices(text: str) -> Any:
    """``"all"``, or ``"0,1"`` as [0, 1]."""
    numbers = text.split(",")
    if text != "all" and not all(number.isdecimal() for number in numbers):
        hint = did_you_mean(text, ("all",)).replace("'", "")
        raise argparse.ArgumentTypeError(f"must be 'all' or numbers of GPUs with commas between them, got {text!r}{hint}")
    return text if text == "all" else [int(number) for number in numbers]


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    top = _Parser(prog="pycuda-conv", description="Convolve files (run), check this machine (info, verify), measure speed (bench, tune).")
    top.add_argument("--version", action="version", version=f"pycuda_conv {pycuda_conv.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="{run,info,verify,bench,tune,calibrate,warm,kernels,choices}")
    _add_run(commands)

    info = commands.add_parser("info", help="show versions, GPUs, the default device, and what is missing")
    info.add_argument("--json", action="store_true", help="print JSON")

    verify = commands.add_parser("verify", help="compute every kind of convolution on every kind of array; compare with float64")
    verify.add_argument("--seed", type=_seed, help="seed of the random data; by default a new one, which is printed")
    verify.add_argument("--cases", metavar="A,B,...", help="only these cases")
    verify.add_argument("--device", type=_device, help="0, cuda:1, opencl, ...; by default the first GPU, or OpenCL without one")
    verify.add_argument("--list", action="store_true", help="print the cases and stop")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.add_argument("--pages", type=Path, metavar="DIR", help="write the errors into docs/results.md of this checkout")

    bench = commands.add_parser("bench", help="measure the suite of problems against torch, after verifying each")
    bench.add_argument("--only", metavar="REGEX", help="only problems whose text matches; --list shows the texts")
    bench.add_argument("--kind", choices=tuple(KINDS), help=f"only layers of this kind: {', '.join(KINDS)}")
    bench.add_argument(
        "--mode", nargs="+", choices=(*MODES, "all"), default=[], metavar="MODE",
        help=f"dtype and arithmetic of both sides: {', '.join(MODES)}, several of them, or all; nhwc is channels last; by default fp32",
    )
    bench.add_argument(
        "--suite", choices=("published", "kernelbench", "drawn", "numbers"), default="published",
        help="layers of published networks; KernelBench's in every way of torch's; random ones and gradients; or a few in fp32 "
        "with every kind of numbers, those that take the exact path too",
    )
    bench.add_argument("--untuned", action="store_true", help="leave measured choices out of account: the models choose")
    bench.add_argument("--quick", action="store_true", help="fewer repetitions; with --batches: bits alone, no times")
    bench.add_argument("--host-calls", action="store_true", help="measure only what a call costs on the host")
    bench.add_argument("--host-cost", action="store_true", help="measure what each way to call costs the host, against torch, and threads")
    bench.add_argument("--loop", action="store_true", help="measure a loop of launches over images and channels against one launch")
    bench.add_argument("--host", action="store_true", help="measure calls on numpy arrays, copies included, against torch, and the bus")
    bench.add_argument("--images", action="store_true", help="measure filters of images against CuPy, or on the CPU against scipy")
    bench.add_argument("--families", type=_count, metavar="N", help="measure the planner's choices for N random problems of each family")
    bench.add_argument(
        "--batches", type=_count, metavar="N", help="compare the bits of N random layers in batches with batch_invariant=True, and the time"
    )
    bench.add_argument("--energy", action="store_true", help="measure the energy of the suite and of training steps by the GPU's counter")
    bench.add_argument("--cold", action="store_true", help="measure first calls, each in a fresh process, against torch's")
    bench.add_argument("--training", action="store_true", help="measure gradients and fused layers against torch; with --models: training")
    bench.add_argument(
        "--models", nargs="*", metavar="NETWORK",
        help="measure these networks: torchvision's, timm:NAME, segformer_b0, vae_decoder, small_unet, time_unet, decoder:SEED, unet:SEED; "
        "with --training, training too",
    )
    bench.add_argument(
        "--draw", type=_count, metavar="N", help="with --models: N of timm's networks, drawn by the seed; with --suite drawn: of each kind"
    )
    bench.add_argument(
        "--seconds", type=_seconds, metavar="SECONDS", help="of most benchmarks: begin no case after so many seconds"
    )
    bench.add_argument("--devices", type=_devices, metavar="all|0,1,...", help="with --host: measure several of these GPUs at once too")
    bench.add_argument("--device", type=_device, help="a GPU, or opencl: a few small problems on PoCL against torch on the CPU")
    bench.add_argument("--seed", type=_seed, help="seed of the random data; by default a new one")
    bench.add_argument("--list", action="store_true", help="print the problems and stop")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write everything measured as JSON")
    bench.add_argument("--csv", type=Path, metavar="FILE", help="write the rows of the suite as CSV")
    bench.add_argument("--plots", type=Path, metavar="DIR", help="write ratios.svg and roofline.svg, one of each for every mode")
    bench.add_argument("--pages", type=Path, metavar="DIR", help="write the results into docs/results.md and README.md of this checkout")

    tune = commands.add_parser("tune", help="measure which kernel and tile are the fastest for each problem; later calls use them")
    tune.add_argument("--precision", choices=("fp32", "tf32", "both"), default="fp32", help="arithmetic for float32 arrays")
    tune.add_argument("--dtype", choices=("float16", "bfloat16", "float32", "float64", "all"), default="float32", help="type of the arrays")
    tune.add_argument("--layout", choices=("NCHW", "NHWC", "both"), default="NCHW", help="layout of the arrays; NHWC is channels last")
    tune.add_argument("--match", metavar="TEXT", default="", help="only problems whose text contains this; --list shows the texts")
    tune.add_argument("--limit", type=_seconds, metavar="SECONDS", help="begin no further problem after so many seconds")
    tune.add_argument("--output", type=Path, metavar="FILE", help="add to this table instead of the user's")
    tune.add_argument("--all", action="store_true", help="measure again what was measured before")
    tune.add_argument("--device", type=_device, help="a GPU; by default the first")
    tune.add_argument("--list", action="store_true", help="print the problems and stop")

    calibrate = commands.add_parser(
        "calibrate", help="time random problems for ten minutes: by what the models' times are multiplied on this GPU; later calls use it"
    )
    calibrate.add_argument("--seconds", type=_seconds, default=600.0, help="how long to measure; by default 600")
    calibrate.add_argument("--seed", type=_seed, help="seed of the problems; by default a new one")
    calibrate.add_argument("--output", type=Path, metavar="FILE", help="write this file instead of the user's")
    calibrate.add_argument("--merge", nargs="+", type=Path, default=[], metavar="FILE", help="add the timings of these files")
    calibrate.add_argument("--fit", action="store_true", help="measure nothing: fit the timings of the files of --merge anew")
    calibrate.add_argument("--device", type=_device, help="a GPU; by default the first")

    warm = commands.add_parser(
        "warm", help="compile kernels before they are needed",
        description="Compile kernels before they are needed, as many at a time as there are cores: those of the benchmark's layers, of a "
        "model's, or those that random layers need most often.",
    )
    warm.add_argument("--model", metavar="NAME", help="the layers of this network of torchvision's")
    warm.add_argument("--size", type=_sizes, default=(8, 3, 224, 224), metavar="N,C,H,W", help="with --model: the images")
    warm.add_argument("--mode", nargs="+", choices=(*MODES, "all"), default=[], metavar="MODE", help="as for bench; by default fp32")
    warm.add_argument("--training", action="store_true", help="the gradients too")
    warm.add_argument("--random", type=_count, metavar="N", help="the N kernels that random layers of all families need most often")
    warm.add_argument("--constants", action="store_true", help="kernels that know a layer's constants too")
    warm.add_argument("--device", type=_device, help="a GPU, or opencl: there, unless layers are asked for, all kernels are compiled")
    warm.add_argument("--gpu", metavar="ARCH", help="for such a GPU, sm_90a for one, which need not be here")

    kernels = commands.add_parser("kernels", help="count, or list, all texts of kernels that problems may ask for")
    kernels.add_argument("architectures", nargs="*", metavar="ARCH", help="sm_90a, sm_80, opencl, ...; by default these three")
    kernels.add_argument("--list", action="store_true", help="print every text's defines")

    choices = commands.add_parser(
        "choices", help="show what an engine is worth, by the models",
        description="Draw random problems of all families and choose kernels for them with and without an engine, by the engines' models. "
        "Nothing runs on a GPU.",
    )
    choices.add_argument("--without", nargs="+", default=[], metavar="ENGINE", help="engines to leave out; by default each in turn")
    choices.add_argument("--gpu", default="sm_90a", metavar="ARCH", help="the GPU, which need not be here; by default sm_90a")
    choices.add_argument("--each", type=_count, default=100, metavar="N", help="problems of every family, by default 100")
    choices.add_argument("--seed", type=_seed, default=0, help="seed of the problems, by default 0")
    choices.add_argument("--json", type=Path, metavar="FILE", help="write the problems that the engines win as JSON")

    for name, examples in EXAMPLES.items():
        command = commands.choices[name]
        command.epilog, command.formatter_class = "\n  pycuda-conv ".join(("examples:", *examples)), _Help
    return top


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run", help="convolve a .npy file, however large, a zarr array, a TIFF, or a picture",
        description="Convolve a .npy file, however large, a zarr array, a TIFF of several pages, or a picture. Arrays are padded with "
        "zeros. Arrays of integers give floats: float32 for 8 and 16 bits, float64 for more. A picture keeps its size and its "
        "transparency; its border is repeated outwards. With a filter that has no channels a zarr array or a TIFF is treated likewise, "
        "plane by plane or volume by volume.",
    )
    run.add_argument(
        "input", type=_place, nargs="+",
        help="a .npy file of shape (N, C, ...) or (C, ...), a .zarr or OME-Zarr, also at an address that fsspec opens, a TIFF, or a "
        "picture; several of them, patterns with * in quotes, or a folder, for all such files in it and below",
    )
    run.add_argument("output", type=_output, help="what to write, by its name, or a folder, which is made if there is none")
    run.add_argument(
        "--filter", required=True, metavar="FILE|NAME",
        help="a .npy file of shape (K, C/groups, ...); for pictures (R, S) too, for volumes (T, R, S); or, for both, sharpen, blur, edge, "
        "emboss, identity, gaussian:SIGMA, box:SIZE",
    )
    run.add_argument("--bias", type=Path, metavar="FILE", help="a .npy file of shape (K,)")
    run.add_argument("--stride", type=_sizes, metavar="N|N,N", help="steps of the filter, for all axes or one for each; by default 1")
    run.add_argument("--padding", type=_padding, metavar="N|same|valid|T,B,L,R", help="zeros around the input, by default none")
    run.add_argument(
        "--border", choices=("zeros", "replicate", "reflect", "symmetric", "circular"),
        help="what lies outside, by default the border's pixels for pictures and named filters, and zeros for arrays",
    )
    run.add_argument(
        "--dtype", choices=("bool", "uint8", "int8", "uint16", "int16", "float32", "float64"),
        help="the type of a picture that is written, as of a TIFF; by default its own",
    )
    run.add_argument("--dilation", type=_sizes, metavar="N|N,N", help="distance between the taps of the filter; by default 1")
    run.add_argument("--groups", type=_count, metavar="N", help="groups of channels, each convolved by itself; by default 1")
    run.add_argument("--transposed", action="store_true", help="compute the transposed convolution")
    run.add_argument("--output-padding", type=_sizes, metavar="N|N,N", help="with --transposed: rows and columns added at the end")
    run.add_argument(
        "--activation", type=_activation, metavar="NAME",
        help=f"what follows the sums: {', '.join(str(one) for one in ACTIVATIONS[1:])}, or leaky_relu:0.2 for another slope than 0.01",
    )
    run.add_argument("--precision", choices=("fp32", "tf32"), default="fp32", help="arithmetic for float32 arrays")
    run.add_argument(
        "--algorithm", choices=ALGORITHMS,
        help="direct: sums of products alone; fft: Fourier transforms, whose errors may be relative to norms; by default what is fastest "
        "with every element right",
    )
    where = run.add_mutually_exclusive_group()
    where.add_argument("--device", type=_device, help="0, cuda:1, opencl, ...; by default the first GPU, or OpenCL without one")
    where.add_argument("--devices", type=_devices, metavar="all|0,1,...", help="share the work among these GPUs")
    run.add_argument(
        "--axes", type=_axes, metavar="LETTERS",
        help="what the axes of a zarr array or a TIFF are, a letter for each, as tczyx: c are the channels, x, y and z space, all others "
        "images; by default what the file says. A filter of two dimensions goes along y and x, one of three along z too",
    )
    run.add_argument("--scheduler", metavar="ADDRESS", help="compute on this cluster of dask.distributed, which must see the files")
    run.add_argument("--resume", action="store_true", help="keep what is complete when interrupted, and go on from there the next time")
    run.add_argument("--batch", type=_count, metavar="N", help="images to convolve at a time; by default as many as fill 256 MiB")
    run.add_argument("--force", action="store_true", help="replace the output if it exists")


def _run(arguments: argparse.Namespace) -> int:
    # the tools are imported when they are asked for: --help need not wait
    if arguments.command == "info":
        from pycuda_conv.tools import info

        return info.run(arguments.json)
    if arguments.command == "verify":
        from pycuda_conv.tools import verify

        if arguments.list:
            return verify.list_cases()
        return verify.run(arguments.cases, arguments.device, arguments.seed, arguments.json, arguments.pages)
    if arguments.command == "run":
        from pycuda_conv.tools import run

        chosen = {name: value for name, value in vars(arguments).items() if name != "command"}
        return run.run_all(arguments.input, run.Settings(**chosen))
    if arguments.command == "choices":
        from pycuda_conv.tools import ablation

        return ablation.run(arguments.without, arguments.gpu, arguments.seed, arguments.each, arguments.json)
    if arguments.command == "kernels":
        from pycuda_conv.tools import kernels

        return kernels.run(tuple(arguments.architectures), arguments.list)
    if arguments.command == "warm":
        from pycuda_conv.tools import warm

        modes = tuple(MODES) if "all" in arguments.mode else tuple(dict.fromkeys(arguments.mode))
        chosen = {name: value for name, value in vars(arguments).items() if name not in ("command", "mode")}
        return warm.run(warm.Settings(**chosen, mode=modes or None))
    if arguments.command == "calibrate":
        from pycuda_conv.tools.benchmarks import calibrate

        given = {name: value for name, value in vars(arguments).items() if name not in ("command", "merge")}
        return calibrate.run(calibrate.Settings(**given, merge=tuple(arguments.merge)))
    if arguments.command == "tune":
        from pycuda_conv.tools import tune

        wishes = tune.Settings(**{name: value for name, value in vars(arguments).items() if name not in ("command", "list")})
        return tune.list_problems(wishes) if arguments.list else tune.run(wishes)
    from pycuda_conv.tools import bench, training
    from pycuda_conv.tools.benchmarks import hostbench

    modes = tuple(MODES) if "all" in arguments.mode else tuple(dict.fromkeys(arguments.mode))
    settings = bench.Settings(
        only=arguments.only, kind=arguments.kind, modes=modes or ("fp32",), quick=arguments.quick, host_calls=arguments.host_calls,
        device=arguments.device, seed=arguments.seed, seconds=arguments.seconds, json=arguments.json, csv=arguments.csv,
        plots=arguments.plots, pages=arguments.pages, untuned=arguments.untuned,
    )
    _check_benchmarks(arguments)
    if arguments.host:
        return hostbench.list_problems(settings) if arguments.list else hostbench.run(settings, arguments.devices)
    if arguments.devices is not None:
        raise ToolError("--devices goes with --host only")
    if arguments.cold:
        from pycuda_conv.tools.benchmarks import coldbench

        return coldbench.run(settings)
    if arguments.host_cost:
        from pycuda_conv.tools.benchmarks import hostcost

        return hostcost.list_cases() if arguments.list else hostcost.run(settings)
    if arguments.loop:
        from pycuda_conv.tools.benchmarks import loopbench

        return loopbench.run(settings)
    if arguments.images:
        from pycuda_conv.tools.pictures import bench as imagebench

        return imagebench.run(settings)
    if arguments.families:
        from pycuda_conv.tools import choices

        return choices.run(arguments.device, settings.modes, arguments.seed, arguments.families, arguments.json)
    if arguments.energy:
        from pycuda_conv.tools.benchmarks import energybench

        return energybench.run(settings)
    if arguments.batches:
        from pycuda_conv.tools.benchmarks import batchbench

        return batchbench.run(settings, modes or tuple(MODES), arguments.batches)
    if arguments.suite == "numbers":
        from pycuda_conv.tools.benchmarks import numbersbench

        return numbersbench.run(settings)
    if arguments.suite != "published":
        from pycuda_conv.tools.benchmarks import layerbench

        return layerbench.run(settings, arguments.suite, arguments.draw or layerbench.EACH)
    if arguments.models is not None:
        from pycuda_conv.tools import models

        if arguments.list:
            return models.list_cases(settings, modes, arguments.training, arguments.models)
        return models.run(settings, modes, arguments.training, arguments.models, arguments.draw or 0)
    if arguments.training:
        return training.list_problems(settings) if arguments.list else training.run(settings)
    return bench.list_problems(settings) if arguments.list else bench.run(settings)


def _check_benchmarks(arguments: argparse.Namespace) -> None:
    """Refuse two benchmarks at once, of which one alone would be run."""
    benchmarks = "host", "host_calls", "host_cost", "loop", "cold", "images", "families", "batches", "energy", "training", "models"
    asked = [name for name in benchmarks if getattr(arguments, name)]
    if arguments.models == []:
        asked.append("models")
    if len(asked) > 1 and asked != ["training", "models"]:
        flags = [f"--{name.replace('_', '-')}" for name in asked]
        raise ToolError(f"{' and '.join(flags[:2])} are two benchmarks; ask for one at a time")
    if arguments.suite != "published" and asked:
        raise ToolError(f"--suite {arguments.suite} and --{asked[0].replace('_', '-')} are two benchmarks; ask for one at a time")
    layers = arguments.suite != "published"
    if arguments.draw is not None and arguments.models is None and arguments.suite != "drawn":
        raise ToolError("--draw goes with --models and --suite drawn only")
    timed = "models", "batches", "training", "host", "energy"
    timeless = [name for name in asked if name not in timed and arguments.models is None]
    if arguments.seconds is not None and timeless:
        raise ToolError(f"--seconds is not for --{timeless[0].replace('_', '-')}")
    of_others = ["list", "kind", "quick", "csv", "plots", "pages"]
    of_others_alone = (
        ("cold", [*of_others, "mode", "seed"]), ("families", [*of_others, "only"]), ("loop", ["list"]),
        ("batches", [*(option for option in of_others if option != "quick"), "only"]),
        ("energy", ["list", "kind", "mode", "quick", "csv", "plots", "only"]),
        ("images", ["list", "kind", "mode", "csv", "plots", "seed"]),
    )  # fmt: skip
    of_suites = {"kernelbench": ["mode"], "numbers": ["mode", "only", "plots"], "drawn": ["only", "plots"]}
    of_layers = ["list", "kind", "csv", "quick", *of_suites.get(arguments.suite, [])]
    for name, options in (*of_others_alone, *([("suite", of_layers)] if layers else [])):
        for option in options if getattr(arguments, name) else ():
            if getattr(arguments, option) not in (None, False, []):
                raise ToolError(f"--{option} is not for --{name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    with interrupt.raised():
        try:
            return _main(argv)
        except BaseException as error:
            came = interrupt.behind(error)
            if came is None:
                raise
            return _ended(came)


def _main(argv: Sequence[str] | None) -> int:
    with streams.forgiving() as lost:
        command = "pycuda-conv"
        try:
            arguments = parser().parse_args(argv)
            command = f"pycuda-conv {arguments.command}"
            status = _run(arguments)
        except (ToolError, BackendError, MemoryError, VariableError, OSError) as error:
            if interrupt.behind(error):
                raise
            print(f"{command}: {_said(error)}", file=sys.stderr)
            return UNUSABLE
    if lost:
        print(f"{command}: {lost[0].strerror}", file=sys.stderr)
        return status or (OK if arguments.command == "run" else UNUSABLE)  # what `run` makes are files
    return status


def _said(error: Exception) -> str:
    """The line for what can't be done."""
    if isinstance(error, OSError):
        what = error.strerror or str(error)
        return what if error.filename is None else f"{error.filename}: {what}"
    return in_options(" ".join(str(error).split())) or "too little memory"


def _ended(error: KeyboardInterrupt | interrupt.Terminated) -> int:
    status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else int(str(error.code))
    how = getattr(error, "how", "")
    print(interrupt.word(status) + (how and f"; {how}"), file=sys.stderr, flush=True)
    opencl = sys.modules.get("pycuda_conv.runtime.opencl")
    end = time.monotonic() + PATIENCE
    while opencl is not None and opencl.compiling():
        if time.monotonic() > end:
            print("stopping: a kernel is still being compiled", file=sys.stderr, flush=True)
            break
        time.sleep(0.02)
    # Python notes where Ctrl-C left a text that exec() was given, a dataclass's methods for one, and ends the process by the signal itself,
    # even though the exception was caught. It forgets that when the next text begins.
    exec("")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
