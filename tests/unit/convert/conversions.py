"""What the converter's tests share: the command in this process, models in other shapes,
checkpoints of any layout.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadiff.checkpoint.run_folders import progress_record
from megadiff.convert.command import main
from megadiff.tensors.shards import Shard, ShardFolder
from megadiff.tensors.snapshot import Snapshot
from megadiff.types import LoraSpec, Progress

WEIGHTS = Path("transformer") / "diffusion_pytorch_model.safetensors"
NAME = "transformer_blocks.1.attn.to_q.weight"
RANK, ALPHA = 4, 10.0  # of conftest.py's adapter
PEFT = "adapter_model.safetensors"
PROMPTS = {"position": 14, "num_prompts": 9, "seed": 0, "shuffle": 1}


def run(*arguments: object) -> int:
    """`megadiff convert …` in this process."""
    return main([str(each) for each in arguments])


def refused(capsys, *arguments: object) -> str:
    """The reason why the command did nothing."""
    assert run(*arguments) == 2
    return capsys.readouterr().err


def contents(folder: Path) -> dict[str, str]:
    """Relative path → digest of every file in a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether both hold the same names and bits."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def rewrite(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def changed_adapter(adapter: Path, out: Path, **changes: object) -> Path:
    """A copy of a peft folder with other settings."""
    file = shutil.copytree(adapter, out) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return out


def resaved(
    model: Path, out: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "10GB"
) -> Path:
    """The pipeline with its transformer as diffusers saves it otherwise."""
    shutil.copytree(
        model, out, ignore=lambda folder, names: ["transformer"] if Path(folder) == model else []
    )
    transformer = QwenImageTransformer2DModel.from_pretrained(
        model / "transformer", torch_dtype=dtype
    )
    transformer.save_pretrained(out / "transformer", max_shard_size=max_shard_size)
    return out


def transformer(model: Path) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel.from_pretrained(model / "transformer")


def pairs(file: Path) -> dict[str, Tensor]:
    """The tensors under our names."""
    prefix = "base_model.model." if file.name == PEFT else "transformer."
    return {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}


def stored(checkpoint: Path) -> dict[str, Tensor]:
    """Name → full tensor of all that a checkpoint holds."""
    folder, tensors = ShardFolder(checkpoint), {}
    for name, shape in folder.shapes.items():
        tensors[name] = torch.empty(shape)
        folder.read_into(name, Shard(local=tensors[name], offsets=(0,) * len(shape), shape=shape))
    return tensors


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    model: Path,
    *,
    num_ranks: int = 2,
    step: int = 7,
    lora: LoraSpec | None = None,
) -> Path:
    """A checkpoint of named full tensors (`model/transformer.…`): matrices by rows over ranks, the
    rest on the first.
    """
    values: dict[str, object] = {
        "optimizer_steps": {"transformer": step},
        **({"lora": asdict(lora)} if lora else {}),
    }
    for rank in range(num_ranks):
        shards = {
            name: [_part(tensor, rank, num_ranks)]
            for name, tensor in tensors.items()
            if rank == 0 or tensor.ndim > 1
        }
        Snapshot(shards=shards, rank=rank, num_files=num_ranks, values=values).write(folder)
    (folder / "config.yaml").write_text(json.dumps({"model": {"path": str(model)}, "seed": 3}))
    seal(folder, step=step)
    return folder


def seal(folder: Path, *, step: int = 7) -> None:
    """Writes progress.json, with the sizes that files have now."""
    (folder / "progress.json").unlink(missing_ok=True)
    record = progress_record(folder, Progress(step=step, prompts=PROMPTS))
    (folder / "progress.json").write_bytes(record)


def policy_state(model: Path, factors: Mapping[str, float]) -> dict[str, Tensor]:
    """Of each kind (model, average, optim/exp_avg, …): the model's weights, changed and multiplied
    by a factor.
    """
    source = load_file(model / WEIGHTS)
    return {
        f"{kind}/transformer.{name}": factor * (tensor + 1e-3)
        for kind, factor in factors.items()
        for name, tensor in source.items()
    }


def _part(tensor: Tensor, rank: int, num_ranks: int) -> Shard:
    if tensor.ndim < 2:
        return Shard(local=tensor, offsets=(0,) * tensor.ndim, shape=tuple(tensor.shape))
    bounds: Sequence[int] = [len(tensor) * at // num_ranks for at in range(num_ranks + 1)]
    rows = slice(bounds[rank], bounds[rank + 1])
    return Shard(
        local=tensor[rows],
        offsets=(rows.start, *[0] * (tensor.ndim - 1)),
        shape=tuple(tensor.shape),
    )
