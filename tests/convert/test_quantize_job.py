"""`python scripts/quantize.py`: from a configuration to a folder, and what a person is told."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from qerl import build
from qerl.build.conversion import quantize
from qerl.model.load import load_policy
from qerl.model.source import Folder, Toy
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4

ROOT = Path(__file__).parents[2]
Compose = Callable[..., DictConfig]
SMALL = (
    "model=toy",
    "trainer=cpu",
    "calibration=arithmetic",
    "calibration.sequences=4",
    "calibration.length=64",
)
PICTURE = "quantization_report.png"


@pytest.fixture
def conversion(composed: Compose) -> Compose:
    return lambda *overrides: composed(*SMALL, *overrides, config="quantize")


@pytest.mark.parametrize("method", ["rtn", "mse", "awq", "gptq"])
@pytest.mark.parametrize("quant", ["nvfp4", "mxfp4"])
def test_every_method_writes_a_folder_that_loads(
    conversion: Compose, method: str, quant: str
) -> None:
    told = quantize(conversion(f"quant={quant}", f"quant.method={method}"))
    folder = Path(f"out/quantized/toy-{quant}-{method}")
    assert told.startswith(f"{folder}: 0.000 G weights")
    assert "sqnr_mean_db" in told
    assert ("output_error_mean" in told) == (method in ("awq", "gptq"))
    format = {"nvfp4": NVFP4, "mxfp4": MXFP4}[quant](method=method)
    policy = load_policy(Folder(folder), format, None)
    assert policy.linear_bits_per_weight() < 4.6
    again = quantize(conversion(f"quant={quant}", f"quant.method={method}"))
    assert "is there already, made with the same settings" in again
    listed = json.loads((folder / "checksums.json").read_text())
    assert listed["settings"]["tool"].startswith("qerl ")
    assert (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert PICTURE in listed["files"]
    assert ("calibration" in listed["settings"]) == (method in ("awq", "gptq"))


def test_the_folder_holds_the_bytes_that_loading_makes(conversion: Compose) -> None:
    quantize(conversion())
    loaded = load_policy(Folder("out/quantized/toy-nvfp4-rtn"), NVFP4(), None)
    assert loaded.base_hash() == load_policy(Toy(), NVFP4(), None).base_hash()


def test_training_starts_from_the_folder(conversion: Compose, composed: Compose) -> None:
    quantize(conversion())
    outcome = build.train(
        composed(
            "model=folder",
            "model.source.path=out/quantized/toy-nvfp4-rtn",
            "data=toy",
            "trainer=cpu",
            "logger=none",
            "record_dir=null",
            "trainer.max_steps=1",
            "trainer.evaluation.problems=0",
            "algorithm.prompts_per_step=2",
            "algorithm.group_size=2",
        )
    )
    assert "completed" in outcome.text


def test_output_errors_of_a_data_free_method_are_measured_on_request(conversion: Compose) -> None:
    assert "output_error_mean 0." in quantize(conversion("output_error=true"))


def test_other_calibration_is_another_conversion(conversion: Compose) -> None:
    quantize(conversion("quant.method=gptq"))
    with pytest.raises(ValueError, match=r"other settings \(calibration\.tokens_sha256: "):
        quantize(conversion("quant.method=gptq", "calibration.seed=1"))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["quant=nf4"], "quant=nf4: compressed-tensors packs nvfp4 and mxfp4"),
        (["quant.method=best"], r"quant\.method=best: one of rtn, mse, awq, gptq"),
        (["out=null"], r"out=None: name the folder to write, for example out=/models/mine"),
        (["out="], r"out=: name the folder to write"),
        (["shard_gb=0"], r"shard_gb=0: GB of data in one file, above 0"),
        (["shard_gb=two"], r"shard_gb=two"),
        (["model=qwen2.5-32b", "model.source.path=/nowhere"], r"/nowhere: no config\.json"),
        (["calibration.length=100000", "quant.method=awq"], "has a context of 4096 tokens; set"),
    ],
)
def test_wrong_settings_are_one_line_with_a_cure(
    conversion: Compose, overrides: list[str], says: str
) -> None:
    with pytest.raises(build.EXPECTED_ERRORS, match=says) as caught:
        quantize(conversion(*overrides))
    assert "\n" not in build.one_line(caught.value)
    assert not Path("out").exists()


def test_what_is_quantised_is_not_quantised_again(conversion: Compose) -> None:
    quantize(conversion())
    packed = ["model=qwen2.5-7b", "model.source.path=out/quantized/toy-nvfp4-rtn"]
    with pytest.raises(ValueError, match=r"Qwen2\.5-7B-Instruct holds nvfp4 of .* already; bring"):
        quantize(conversion(*packed))


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quantize_script", ROOT / "scripts/quantize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def status(monkeypatch: pytest.MonkeyPatch, error: BaseException, cfg: DictConfig) -> int:
    """The exit status of the script when the conversion ends with `error`."""

    def instead(cfg: DictConfig) -> str:
        raise error

    module = script()
    monkeypatch.setattr(module, "quantize", instead)
    with pytest.raises(SystemExit) as end:
        module.main.__wrapped__(cfg)
    return int(str(end.value.code))


def test_ctrl_c_prints_the_command_that_goes_on(
    conversion: Compose, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert status(monkeypatch, KeyboardInterrupt(), conversion("out=elsewhere")) == 130
    line = f"stopped; to go on: python scripts/quantize.py {' '.join(SMALL)} out=elsewhere"
    assert line in capsys.readouterr().err


def test_an_expected_error_is_one_line_and_status_1(
    conversion: Compose, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert status(monkeypatch, OSError(28, "disk full, make room"), conversion()) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert "disk full, make room" in shown
    assert shown.count("\n") == 1


def test_the_threads_of_a_conversion_change_no_byte(conversion: Compose) -> None:
    quantize(conversion("out=one"))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    quantize(conversion("out=two"))
    torch.set_num_threads(threads)
    for path in Path("one").iterdir():
        assert path.read_bytes() == (Path("two") / path.name).read_bytes(), path.name
