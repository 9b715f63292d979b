"""Libraries that expect torchrun train inside the ranks as they are, and draw their bars."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from nbdist import World
from nbdist.output.bars import BarTable, bar_table, merged_line
from nbdist.output.layout import final_layout, live_layout
from nbdist.output.text import panel_text
from nbdist.world import dispatch

UNTIL_SEEN = """
def until_seen(name, folder={folder!r}):
    'Wait until somebody has seen the bar of this name on all ranks, in the middle.'
    import os, time
    give_up_at = time.monotonic() + 60
    while not os.path.exists(os.path.join(folder, 'seen ' + name.encode().hex())):
        assert time.monotonic() < give_up_at, f'nobody has seen {{name!r}} in the middle'
        time.sleep(0.01)
"""


@dataclass(frozen=True)
class Drawn:
    """The ranks that had bars while a cell ran, the bars' lines in a terminal, the final text."""

    ranks: set[tuple[int, ...]]
    lines: list[str]
    final: str

    def stays(self, name: str, amount: str) -> bool:
        """Whether a bar has stayed in the table of bars, in one row of both ranks."""
        row = rf"^ranks 0-1  {re.escape(name)} *\|█+\| +{re.escape(amount)}  "
        header = "── ranks 0-1 (bars) ──\n"
        return header in self.final and len(re.findall(row, self.final, re.MULTILINE)) == 1


def drawn(world: World, folder: Path, source: str, ranks: Sequence[int] = (0, 1)) -> Drawn:
    """Run a cell with bars on some ranks as a notebook does.

    The cell can call `until_seen(name)` in the middle of a bar, to wait until the table has shown
    this bar for each of the ranks, with a fraction between 0 and 1.
    """
    helped = UNTIL_SEEN.format(folder=str(folder)) + source
    running = world.submit(world.task(helped))
    with_bars, lines = set[tuple[int, ...]](), list[str]()
    for _ in world.follow(running):
        if table := bar_table(running.transcript):
            with_bars.add(table.ranks)
            lines.append(merged_line(running.transcript))
            assert "\n── rank" in panel_text(live_layout(running.transcript, time.monotonic()))
            for name in moving(table, ranks):
                (folder / f"seen {name.encode().hex()}").touch()
    dispatch.check(world.engine, running)
    final = panel_text(final_layout(running.transcript))
    world.engine.connection.release_values(running)
    return Drawn(with_bars, lines, final)


def moving(table: BarTable, ranks: Sequence[int]) -> set[str]:
    """Return the name of the bar in whose middle all ranks are, as a set, or an empty set."""
    rows = {row.rank: row for row in table.rows}
    if any(rank not in rows or not 0 < (rows[rank].bar.fraction or 0) < 1 for rank in ranks):
        return set()
    names = {rows[rank].name for rank in ranks}
    return names if len(names) == 1 else set()


pytestmark = pytest.mark.shared_world(2)

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
def started(started: World) -> World:
    """The world of the module, with some data on both ranks."""
    started.execute(DATA)
    return started


def in_all(world: World, expression: str) -> set[object]:
    """Return the different values that an expression has on the ranks."""
    return set(world.gather(expression))


def needs(library: str) -> None:
    """Skip the test, with the reason, if a library is not installed."""
    pytest.importorskip(library, reason=f"{library} is not installed")


def test_torch_takes_ranks_for_workers_of_torchrun(world: World) -> None:
    """torch takes the ranks for workers of torchrun, and knows their numbers."""
    assert in_all(world, "dist.is_torchelastic_launched()") == {True}
    assert world.gather("(dist.get_rank(), dist.get_world_size())") == [(0, 2), (1, 2)]


TRAINING = {
    "accelerate": """
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
kind = accelerator.num_processes, accelerator.distributed_type.value, len(loader)
assert kind == (2, "MULTI_CPU", 4), kind
assert type(model).__name__ == "DistributedDataParallel"
""",
    "torch.compile": """
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
""",
    "deepspeed": """
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
assert engine.world_size == 2
""",
}


@pytest.mark.parametrize("library", TRAINING)
def test_libraries_average_gradients_over_the_ranks(world: World, library: str) -> None:
    """A library uses the world's process group: weights stay equal on both ranks, losses fall."""
    needs(library.partition(".")[0])
    world.execute(TRAINING[library] + SAME)
    assert in_all(world, "same and losses[-1] < losses[0]") == {True}


def test_lightning_trains_on_the_ranks(world: World, tmp_path: Path) -> None:
    """`Trainer(devices=2, strategy="ddp")` uses the ranks, shows bars, and starts no process."""
    needs("lightning")
    world.call("plot.begin", names=("lightning_loss",))
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
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.log_dict({"lightning_loss": loss, "rank": rank})
        return loss

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
# Python 3.14 starts a tracker for tqdm's lock.
commands = [" ".join(each.cmdline()) for each in psutil.Process().children()]
children = len([each for each in commands if "resource_tracker" not in each])
model = module.model
"""
        + SAME,
        ranks=(0,),
    )
    assert found.ranks == {(0,)}
    assert in_all(world, "(trainer.world_size, trainer.global_step, children)") == {(2, 8, 0)}
    assert world.gather("trainer.global_rank") == [0, 1]
    assert {*world.call("plot.end").rank(1)} == {"lightning_loss", "rank"}
    # From both trainings, each with 2 epochs of 4 steps on a rank.
    assert [*world.tracked("lightning_loss")["step"]] == 2 * [*range(8)]
    assert in_all(world, "same") == {True}
    assert in_all(world, "dist.get_world_size()") == {2}


def test_transformers_trains_on_the_ranks(world: World, tmp_path: Path) -> None:
    """Hugging Face's `Trainer` trains a tiny model on both ranks; rank 0 shows a bar."""
    needs("transformers")
    needs("accelerate")
    world.call("plot.begin", names=("loss", "lr"))
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
    assert re.search(r"\|█+\| +4/4  ", found.final)
    assert in_all(world, "(arguments.world_size, done.global_step)") == {(2, 4)}
    assert world.gather("arguments.process_index") == [0, 1]
    assert {"lr", "loss", "grad_norm"} <= {*world.call("plot.end").rank(0)}
    assert [*world.tracked("loss")["step"]] == [1, 2, 3, 4]
    assert world.tracked("lr")["rank 1"].is_monotonic_decreasing
    assert in_all(world, "same") == {True}


def test_torchmetrics_computes_over_all_ranks(world: World) -> None:
    """A metric's `compute` covers the updates of all ranks."""
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


def test_bars_of_tqdm_are_rows_of_the_ranks(world: World, tmp_path: Path) -> None:
    """Plain, auto, notebook and nested bars are rows of both ranks; the last state stays."""
    found = drawn(
        world,
        tmp_path,
        """
from tqdm import tqdm
from tqdm.auto import tqdm as auto
from tqdm.notebook import tqdm as of_notebook
for name, each in (("plain", tqdm), ("auto", auto), ("notebook", of_notebook)):
    for step in each(range(8), desc=name, mininterval=0):
        if step == 3 + rank:
            until_seen(name)
for epoch in tqdm(range(3), desc="epoch", mininterval=0):
    for step in tqdm(range(5), desc="step", leave=False, mininterval=0):
        if (epoch, step) == (1, 2 + rank):
            until_seen("epoch 1/3, step")
""",
    )
    assert (0, 1) in found.ranks
    line = r"\[0-1\] epoch 1/3, step \d+%( \(\d+-\d+\))? \d\d:\d\d(<\d\d:\d\d)?"
    assert any(re.fullmatch(line, said) for said in found.lines)
    for name, total in (("plain", 8), ("auto", 8), ("notebook", 8), ("epoch", 3)):
        assert found.stays(name, f"{total}/{total}")
    assert "step" not in found.final


def test_the_bar_of_datasets_is_a_row_of_the_ranks(world: World, tmp_path: Path) -> None:
    """The bar of `Dataset.map` is a row of both ranks, and its last state stays."""
    needs("datasets")
    found = drawn(
        world,
        tmp_path,
        """
import time
import datasets

def slowly(row):
    if row["x"] == 20:
        time.sleep(0.5)  # what it waits between two drawings, and more
    if row["x"] == 30:
        until_seen("Map")
    return {"y": row["x"]}

rows = datasets.Dataset.from_dict({"x": list(range(40))})
rows.map(slowly, keep_in_memory=True)
""",
    )
    assert (0, 1) in found.ranks
    assert found.stays("Map", "40/40")


# --- objects that a notebook has made with the libraries ----------------------------------------

MADE_IN_A_NOTEBOOK = """
import json, sys, warnings
warnings.simplefilter("ignore")
import accelerate, lightning, torch, transformers
from nbdist.errors import VariableNotSent
from nbdist.notebook.shipping import plan
from nbdist.world.name_table import NameTable

net, here = torch.nn.Linear(1, 1), {"accelerator": "cpu", "devices": 1}
accelerator = accelerate.Accelerator(cpu=True)
optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
loader = accelerator.prepare(torch.utils.data.DataLoader([1, 2]))
args = transformers.TrainingArguments("out", report_to=[], use_cpu=True)
names = {
    "accelerator": accelerator,
    "state": accelerate.PartialState(),
    "loader": loader,
    "optimizer": optimizer,
    "args": args,
    "hf": transformers.Trainer(net, args),
    "trainer": lightning.Trainer(logger=False, enable_checkpointing=False, **here),
    "fabric": lightning.Fabric(**here),
    "net": net,
    "config": transformers.BertConfig(),
}
said = {}
for name in names:
    try:
        plan(name, NameTable(names), (0,)).shipment()
    except VariableNotSent as error:
        said[name] = str(error).partition(")")[0]
print(json.dumps(said))
"""


def test_objects_of_a_single_process_are_not_sent(tmp_path: Path) -> None:
    """Objects that hold a single process's state are refused by their path; others can be sent."""
    run = subprocess.run(
        [sys.executable, "-c", MADE_IN_A_NOTEBOOK], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    assert said == {
        "accelerator": "`accelerator` (Accelerator",
        "state": "`state` (PartialState",
        "loader": "`loader` (DataLoaderShard",
        "optimizer": "`optimizer`: `optimizer.accelerator_state` (AcceleratorState",
        "args": "`args`: `args.distributed_state` (PartialState",
        "hf": "`hf`: `hf.args.distributed_state` (PartialState",
        "trainer": "`trainer` (Trainer",
        "fabric": "`fabric` (Fabric",
    }
