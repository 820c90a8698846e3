"""The fourth job: what a run trained, and what it trained on, as folders that others load."""

import logging
import shutil
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from qerl.build.config import checkpoint_identity, make, quiet_libraries
from qerl.build.conversion import GB, shard_bytes, told, tool
from qerl.build.parts import base_model
from qerl.convert.convert import convert
from qerl.convert.export import Merge, TrainedSource, check_adapter, copy_packed, lost
from qerl.convert.job import Converted, Job
from qerl.convert.method import Method, Rtn
from qerl.convert.methods import Mse
from qerl.model.adapter_io import read_peft, weights_digest, write_peft
from qerl.model.packing import check_quant, read_packing
from qerl.model.source import Source
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import Format
from qerl.record.conversion import ConversionProgress
from qerl.training.checkpoint import latest, latest_whole
from qerl.training.compute import Compute

log = logging.getLogger(__name__)

WHAT = ("adapter", "merged", "base")


def export(cfg: DictConfig) -> str:
    """Export as `cfg` says; what a person is told.

    Raises:
        ValueError: with one line a person can act on.
        OSError: the disk is full; what is finished stays.
    """
    quiet_libraries()
    if cfg.what not in WHAT:
        raise ValueError(f"what={cfg.what}: one of {', '.join(WHAT)}")
    if not cfg.out:
        raise ValueError("out=null: name the folder to write, for example out=out/exports/mine")
    trained = _trained(cfg)
    out = Path(cfg.out).expanduser()
    if cfg.what == "adapter":
        return _adapter(cfg, trained, out)
    if cfg.what == "merged":
        return _merged(cfg, trained, out)
    return _base(cfg, trained, out)


def _trained(cfg: DictConfig) -> DictConfig:
    """The configuration of the run, with the checkpoint it was trained on."""
    if not cfg.run:
        raise ValueError("run=null: name a run folder, for example run=out/<name>/<run>")
    run = Path(cfg.run).expanduser()
    path = run / "config.yaml"
    if not path.is_file():
        raise ValueError(f"run={run}: no config.yaml there; name a run folder below out/")
    trained = OmegaConf.load(path)
    assert isinstance(trained, DictConfig)
    if cfg.source_path:
        OmegaConf.update(trained, "model.source.path", cfg.source_path)
    now = checkpoint_identity(trained)
    if now and latest(run / "checkpoints") is not None:
        _, state = latest_whole(run / "checkpoints")
        then = {key: state["identity"].get(key) for key in now}
        if then != now:
            raise ValueError(
                f"run={run} was trained on other weights than {trained.model.source.path} holds; "
                "name the folder of then with source_path=<folder>"
            )
    return trained


def _adapter_folder(cfg: DictConfig) -> Path:
    return Path(cfg.adapter or Path(cfg.run) / "adapter").expanduser()


def _adapter(cfg: DictConfig, trained: DictConfig, out: Path) -> str:
    """The adapter alone, with the name of what it was trained on."""
    if out.exists():
        raise ValueError(f"out={out} exists; choose another out= or remove it")
    folder, source = _adapter_folder(cfg), make(trained.model.source)
    lora, matrices = read_peft(folder)
    check_adapter(folder, lora, matrices, source.geometry())
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    base = base_model(trained, source)
    write_peft(lora, matrices, partial, base)
    partial.rename(out)
    return f"{out}: adapter of rank {lora.rank} for {base}"


def _merged(cfg: DictConfig, trained: DictConfig, out: Path) -> str:
    """Base and adapter as one dense folder."""
    folder = _adapter_folder(cfg)
    lora, matrices = read_peft(folder)
    source: Source = make(trained.model.source)
    check_adapter(folder, lora, matrices, source.geometry())
    compute: Compute = make(cfg.trainer.compute)
    own = TrainedSource(source, make(trained.quant), compute.torch_device())
    merge = Merge(sha256=weights_digest(folder), lora=lora, matrices=matrices)
    done = _convert(cfg, own, BF16(), merge, out, dense=True)
    share, unmoved = lost(done.rows)
    if share == float("inf"):
        return f"{told(done)}\nthe adapter is zero: these are the weights of the base, in bf16"
    return (
        f"{told(done)}\nmerging rounds to bf16: the rounding is {100 * share:.1f} % of the update "
        f"(RMS over the linears), {100 * unmoved:.1f} % of their weights do not move; adapter and "
        "base apart lose nothing"
    )


def _base(cfg: DictConfig, trained: DictConfig, out: Path) -> str:
    """The frozen weights with the bytes that they were trained on."""
    source, format = make(trained.model.source), make(trained.quant)
    packing = read_packing(source.config())
    check_quant(source.name, packing, format, source.folder())
    if packing is not None:
        folder = source.folder()
        source.weights()  # refuses what is not whole, and brings what is not here
        with ConversionProgress(out.name, unit="bytes") as display:
            count = copy_packed(folder, out, display.stage)
        return f"{out}: {count / GB:.3f} GB, the files of {folder} as {packing.maker} has them"
    if not isinstance(format, NVFP4 | MXFP4):
        raise ValueError(
            f"quant={format.name}: compressed-tensors packs nvfp4 and mxfp4; the base is the "
            f"checkpoint of {source.name}, packed while it is loaded; export what=merged or "
            "what=adapter"
        )
    method: Method = Mse() if format.method == "mse" else Rtn()
    return told(_convert(cfg, source, format, method, out, dense=False))


def _convert(
    cfg: DictConfig, source: Source, format: Format, method: Method, out: Path, *, dense: bool
) -> Converted:
    largest = shard_bytes(cfg)
    compute: Compute = make(cfg.trainer.compute)
    job = Job(
        source=source,
        format=format,
        method=method,
        out=out,
        shard_bytes=largest,
        device=compute.torch_device(),
        dense=dense,
        facts=tool(),
    )
    with ConversionProgress(out.name) as display:
        return convert(job, display.stage)
