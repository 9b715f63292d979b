"""Stop in trainings, at any moment: `python -m tests.faults.step_stops`.

    python -m tests.faults.step_stops --ranks 2,4 --presses 40 --busy 4 --only DDP,FSDP2

After each Stop the replicas have to be the same on all ranks, or one line has to say that they may
differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from nbdist.world.world import World
from tests.cells import press_stop, run_for
from tests.faults.stops import spinning

BEGIN = """
import time, warnings
warnings.simplefilter("ignore")
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

def loss_of(model):
    return model(torch.randn(8, 32)).square().mean()

def replicas():
    "What all ranks must have alike: parameters, unless they are sharded, and the steps made."
    held = [getattr(p, "to_local", lambda p=p: p)() for p in net.parameters()]
    sums = [] if hasattr(net[0].weight, "to_local") else [p.double().sum().item() for p in held]
    states = [s for o in optimizers for s in o.state.values()]
    return sums, [float(s["step"]) for s in states if "step" in s]

net = make_net()
model = DDP(net)
"""

ADAM = "optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3)]\noptimizer = optimizers[0]\n"

PLAIN = """
while True:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
"""

HAND = """
while True:
    optimizer.zero_grad()
    loss_of(net).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size
    optimizer.step()
"""

ACCUMULATION = """
while True:
    optimizer.zero_grad()
    for _ in range(3):
        with model.no_sync():
            loss_of(model).backward()
    loss_of(model).backward()
    optimizer.step()
"""

AMP = """
while True:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""

TWO = """
while True:
    for optimizer in optimizers:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
"""

LIGHTNING = """
import lightning, logging
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from torch.utils.data import DataLoader, TensorDataset
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()
    def training_step(self, batch, number):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 32)), batch_size=8)
def train():
    global module, trainer
    module = Module()
    trainer = lightning.Trainer(
        devices=world_size, strategy="ddp", accelerator="cpu", max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False)
    try:
        trainer.fit(module, loader)
    finally:
        finish()
def finish():
    global net, optimizers
    net, optimizers = module.net, [o for o in trainer.optimizers]
"""

TRANSFORMERS = """
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
class Model(PreTrainedModel):
    config_class = PretrainedConfig
    def __init__(self, config):
        super().__init__(config)
        self.net = make_net()
    def forward(self, x):
        return {"loss": self.net(x).square().mean()}
rows = [{"x": row} for row in torch.randn(256, 32)]
arguments = TrainingArguments(
    "/tmp/unused", per_device_train_batch_size=4, max_steps=10**6, use_cpu=True, report_to=[],
    save_strategy="no", logging_strategy="no", disable_tqdm=True)
def train():
    global net, optimizers
    hf = Trainer(Model(PretrainedConfig()), arguments, train_dataset=rows)
    net = hf.model.net
    try:
        hf.train()
    finally:
        optimizers = [hf.optimizer.optimizer]
"""

ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
optimizers = []
"""

FSDP2 = "from torch.distributed.fsdp import fully_shard\nmodel = net\nfully_shard(net)\n" + ADAM

SCENARIOS = {
    "DDP": (ADAM, PLAIN),
    "DDP, slower": (ADAM, PLAIN + "    time.sleep(0.05)\n"),
    "DDP, SGD": (ADAM.replace("Adam", "SGD"), PLAIN),
    "DDP, slow ranks": (ADAM, PLAIN + "    time.sleep(0.03 * rank)\n"),
    "FSDP2": (FSDP2, PLAIN),
    "averaging by hand": (ADAM, HAND),
    "accumulation": (ADAM, ACCUMULATION),
    "AMP": (ADAM + "scaler = torch.amp.GradScaler('cpu')", AMP),
    "two optimizers": (
        "optimizers = [torch.optim.Adam(layer.parameters()) for layer in (net[0], net[2])]",
        TWO,
    ),
    "ZeRO": (ZERO, PLAIN),
    "torch.compile": (
        f"model = DDP(torch.compile(net, backend='aot_eager'))\n{ADAM}loss_of(model).backward()",
        PLAIN,
    ),
    "transformers": (TRANSFORMERS, "train()"),
    "Lightning": (LIGHTNING, "train()"),
}
"""By name the source that makes the model, and a cell that trains the model for ever."""

SOONEST, LATEST = 0.3, 0.8  # seconds into the cell when Stop is pressed
LATER = {"transformers": 1.0, "Lightning": 1.5}  # seconds until the training begins


class Press(NamedTuple):
    """The result of a Stop: `is_told` is True if a line said that replicas may differ.

    `steps` is how many steps rank 0 had begun by then.
    """

    steps: int
    differ: bool
    is_told: bool
    seconds: float


def presses_in(world: World, name: str, number: int) -> Iterator[Press]:
    """Press Stop in a training `number` times, after random waits; yield each result."""
    setup, cell = SCENARIOS[name]
    world.execute(BEGIN + setup)
    for _ in range(number):
        wait = random.uniform(SOONEST, LATEST) + LATER.get(name, 0.0)
        running = run_for(world, cell, wait)
        began = time.monotonic()
        press_stop(world, running)
        seconds = time.monotonic() - began
        found = world.gather("replicas()")
        ended = running.transcript[0].done
        steps = 0 if ended is None else ended.steps
        yield Press(steps, _differ(found), bool(running.ending.replicas_text), seconds)


def _differ(found: list[object]) -> bool:
    return any(each != found[0] for each in found)


def main() -> None:
    """Print the results of Stop for each training; exit with code 1 if a line is missing."""
    parser = argparse.ArgumentParser("python -m tests.faults.step_stops", description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--presses", type=int, default=10)
    parser.add_argument("--busy", type=int, default=0, help="processes that spin beside")
    parser.add_argument("--only", default=";".join(SCENARIOS), help="names, with `;` between")
    options = parser.parse_args()
    missing = 0
    for size in map(int, options.ranks.split(",")):
        for name in options.only.split(";"):
            with World(size, log_dir="", show=False) as world, spinning(options.busy):
                done = [*presses_in(world, name, options.presses)]
            steps = sorted(press.steps for press in done)
            told = sum(press.differ and press.is_told for press in done)
            silent = sum(press.differ and not press.is_told for press in done)
            needless = sum(press.is_told and not press.differ for press in done)
            seconds = sorted(press.seconds for press in done)
            missing += silent
            sys.stdout.write(
                f"{size} ranks, {options.busy} beside, {name:18} {len(done):3} Stops "
                f"after {steps[0]} to {steps[-1]} steps: "
                f"{told + silent} differ ({silent} without a line), {needless} lines for nothing; "
                f"{seconds[len(seconds) // 2]:.2f} s, at most {seconds[-1]:.2f} s\n"
            )
            sys.stdout.flush()
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
