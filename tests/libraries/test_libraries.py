"""Libraries that expect torchrun train inside the ranks as they are; each takes real steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import World
from tests.libraries.bars import drawn
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

DATA = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 8)
targets = (inputs.sum(1) > 0).long()


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
"""

SAME = """
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
others = [torch.empty_like(weights) for _ in range(world_size)]
dist.all_gather(others, weights)
same = all(torch.equal(weights, other) for other in others)
"""


@pytest.fixture(scope="module")
def started(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as world:
        world.execute(DATA)
        yield world


@pytest.fixture
def world(started: World) -> World:
    """Two ranks with some data; what they need not have is in order again."""
    return started


def in_all(world: World, expression: str) -> set[object]:
    """The value of an expression, over the ranks."""
    return set(world.gather(expression))


def needs(library: str) -> None:
    """Skip, and say so, where a library is not installed."""
    pytest.importorskip(library, reason=f"{library} is not installed")


def test_torch_believes_it(world: World) -> None:
    """What torchrun's workers can ask of torch they can ask here."""
    assert in_all(world, "dist.is_torchelastic_launched()") == {True}
    assert world.gather("(dist.get_rank(), dist.get_world_size())") == [(0, 2), (1, 2)]


def test_accelerate(world: World) -> None:
    """`Accelerator()` finds the group, splits the data and averages gradients."""
    needs("accelerate")
    world.execute(
        """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
    losses.append(loss.item())
"""
        + SAME
    )
    kind = "(accelerator.num_processes, accelerator.distributed_type.value, len(loader))"
    assert in_all(world, kind) == {(2, "MULTI_CPU", 4)}
    assert in_all(world, "type(model).__name__") == {"DistributedDataParallel"}
    assert in_all(world, "same and losses[-1] < losses[0]") == {True}


def test_lightning(world: World, tmp_path: Path) -> None:
    """`Trainer(devices=2, strategy="ddp")` uses these ranks, whose bars are seen; no processes."""
    needs("lightning")
    found = drawn(
        world,
        tmp_path,
        """
import lightning
import psutil

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, number):
        x, y = batch
        if number == 2 and rank == 0 and self.current_epoch == 0:
            until_seen(self.bar)
        return nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

module = Module()
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

def trainer_with(bar):
    return lightning.Trainer(
        devices=2, strategy="ddp", accelerator="cpu", max_epochs=2, logger=False, callbacks=[bar],
        enable_checkpointing=False, enable_model_summary=False,
    )

loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
module.bar = "Epoch 0/1"
trainer_with(RichProgressBar()).fit(module, loader)
module.bar = "Epoch 0"
trainer = trainer_with(TQDMProgressBar())
trainer.fit(module, loader)
children = len(psutil.Process().children())
model = module.model
"""
        + SAME,
        ranks=(0,),
    )
    assert found.ranks == {(0,)}
    assert in_all(world, "(trainer.world_size, trainer.global_step, children)") == {(2, 8, 0)}
    assert world.gather("trainer.global_rank") == [0, 1]
    assert in_all(world, "same") == {True}
    assert in_all(world, "dist.get_world_size()") == {2}


def test_transformers(world: World, tmp_path: Path) -> None:
    """Hugging Face's `Trainer` trains a tiny model on both ranks; rank 0 shows how far it is."""
    needs("transformers")
    needs("accelerate")
    found = drawn(
        world,
        tmp_path,
        f"folder = {str(tmp_path)!r}"
        """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers import TrainerCallback

torch.manual_seed(2)
config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=16, max_position_embeddings=8, num_labels=2)
tokens = torch.randint(0, 32, (32, 8))
class Waits(TrainerCallback):
    def on_step_begin(self, arguments, state, control, **_):
        if state.global_step == 2 and rank == 0:
            until_seen("")

rows = [{"input_ids": row, "labels": (row.sum() % 2)} for row in tokens]
arguments = TrainingArguments(folder, per_device_train_batch_size=4, max_steps=4, use_cpu=True,
                              report_to=[], save_strategy="no", logging_steps=1)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows,
                  callbacks=[Waits()])
done = trainer.train()
model = trainer.model
""" + SAME,
        ranks=(0,),
    )
    assert found.ranks == {(0,)}
    assert "100%|██████████| 4/4 [" in found.final
    assert in_all(world, "(arguments.world_size, done.global_step)") == {(2, 4)}
    assert world.gather("arguments.process_index") == [0, 1]
    assert in_all(world, "same") == {True}


def test_torchmetrics(world: World) -> None:
    """A metric's `compute` is over what all ranks have seen."""
    needs("torchmetrics")
    world.execute(
        """
from torchmetrics.classification import BinaryAccuracy
metric = BinaryAccuracy()
metric.update(torch.tensor([1, 1, 1, 1]), torch.tensor([1, 1, 1, 1]) * rank)
accuracy = metric.compute().item()
"""
    )
    assert in_all(world, "accuracy") == {0.5}


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_data_loader_with_workers(world: World, context: str) -> None:
    """Workers of a DataLoader get a data set whose class a cell has defined."""
    world.execute(
        f"""
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

class Squares(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return index * index

squares = Squares()
with_workers = dict(num_workers=1, multiprocessing_context={context!r}) if rank == 0 else {{}}
sampler = DistributedSampler(squares, shuffle=False)
loader = DataLoader(squares, batch_size=4, sampler=sampler, **with_workers)
seen = sorted(int(value) for batch in loader for value in batch)
"""
    )
    both = world.gather("seen")
    assert sorted(both[0] + both[1]) == [index * index for index in range(16)]


def test_compile(world: World) -> None:
    """`torch.compile` works in a cell, on a model in DDP."""
    world.execute(
        """
model = nn.parallel.DistributedDataParallel(make_model())
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(compiled(inputs[rank::2]), targets[rank::2])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
        + SAME
    )
    assert in_all(world, "same and losses[-1] < losses[0]") == {True}


def test_fsdp2(world: World) -> None:
    """`fully_shard` finds the mesh of all ranks by itself."""
    world.execute(
        """
from torch.distributed.fsdp import fully_shard
model = fully_shard(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs[rank::2]), targets[rank::2])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
shards = [tuple(p.to_local().shape) for p in model.parameters()]
"""
    )
    assert in_all(world, "shards[0] == (8, 8) and losses[-1] < losses[0]") == {True}


def test_deepspeed(world: World) -> None:
    """`deepspeed.initialize` takes the group that is there, and averages gradients."""
    needs("deepspeed")
    world.execute(
        """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
deepspeed.init_distributed(dist_backend="gloo")
model = make_model()
config = {"train_batch_size": 64, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
losses = []
for _ in range(5):
    loss = nn.functional.cross_entropy(engine(inputs[rank::2]), targets[rank::2])
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
"""
        + SAME
    )
    assert in_all(world, "engine.world_size") == {2}
    assert in_all(world, "same and losses[-1] < losses[0]") == {True}
