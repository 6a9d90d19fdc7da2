"""``scripts/fit_costs.py``: constants are found again from timings, and the file keeps its form. Times are made up here."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from pycuda_conv import engines
from pycuda_conv.engines import calibration, costs
from pycuda_conv.engines.mma.grouped_nhwc import GroupedNhwc
from pycuda_conv.plan import as_called
from pycuda_conv.tools.benchmarks import calibrate
from pycuda_conv.tools.families import draw

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "fit_costs.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("fit_costs", SCRIPT)
    sys.modules["fit_costs"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fit_costs"]


def test_constants_are_found_again(script, tmp_path, monkeypatch, capsys):
    """From times by another constant: it moves there, those that are fixed stay, and of the file nothing else changes."""
    kinds = (("float16", "fp32", "NHWC"),)
    with calibration.replaced(None), costs.replaced({"mma.grouped_nhwc": {"BEGIN": costs.costs("mma.grouped_nhwc").BEGIN * 1.5}}):
        timings = []
        for problem in draw(3, 5, kinds):
            problem = as_called(problem, script.DEVICE)
            known = [(us, one) for us, one in engines.predictions(problem, script.DEVICE) if isinstance(one, GroupedNhwc)]
            timings += [(problem, one, us) for us, one in known[:3]]
    file = tmp_path / "timings.json"
    file.write_text(json.dumps({"timings": calibrate.as_json(timings)}))
    folder = tmp_path / "costs"
    shutil.copytree(costs.FOLDER, folder)
    monkeypatch.setattr(costs, "FOLDER", folder)
    before = json.loads((folder / costs.REFERENCE).read_text())["engines"]
    section = costs.costs("mma.grouped_nhwc")
    kept = dict(vars(section))
    try:
        fixed = [name for name in kept if name != "BEGIN"]
        script.main([str(file), "--engines", "mma.grouped_nhwc", "--fixed", *fixed, "--seconds", "400", "--judge", str(file)])
        assert section.BEGIN / kept["BEGIN"] == pytest.approx(1.5, rel=0.08) and vars(section) | {"BEGIN": kept["BEGIN"]} == kept
    finally:
        vars(section).update(kept)
        script.forgetting()()
    said = capsys.readouterr().out
    assert "mma.grouped_nhwc: " in said and "models alone: " in said and "with factors: " in said
    after = json.loads((folder / costs.REFERENCE).read_text())["engines"]
    assert after["mma.grouped_nhwc"].pop("BEGIN") == [
        pytest.approx(kept["BEGIN"] * 1.5, rel=0.08), before["mma.grouped_nhwc"].pop("BEGIN")[1]
    ]
    assert after == before


def test_a_number_is_changed_where_it_lies(script):
    value = {8: (1.0, {2: 3.0}), 16: 4.0}
    assert script.at(value, (8, 1, 2)) == 3.0 and script.changed(value, (8, 1, 2), 5.0) == {8: (1.0, {2: 5.0}), 16: 4.0}
    assert value == {8: (1.0, {2: 3.0}), 16: 4.0}


def test_what_is_done_together_takes_longer_than_the_longest():
    assert costs.together(3.0, 2.0, 2.0) == pytest.approx(2 * 2 ** (1 / 3)) and costs.together(3.0, 2.0, 0.0) == 2.0
    assert costs.together(100.0, 3.0, 2.0) == pytest.approx(3.0)
