"""`python -m tests.bench.watch`: 50 seeded divergences, 20 sound trainings, and the watch's cost.

People run this by hand, as it takes some minutes.  A divergence counts as named if the reported
step is the first that is compared at or after its cause, and exactly the changed parts are named.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import indent

from nbdist.tools.watch import Divergence
from nbdist.world.world import World

EVERY, STEPS = 5, 30

MODEL = """
import copy, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed({seed})
norm = nn.{norm}(16)
layers = nn.Linear(8, 16, bias=False), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
net = nn.Sequential(*layers)
model = {model}
first, last = [*net[0].parameters(), *norm.parameters()], net[4].parameters()
groups = [{{"params": first}}, {{"params": last}}]
optimizer = torch.optim.{optimizer}
batches = torch.randn({steps} + 2, 12, 8, generator=torch.Generator().manual_seed({data}))
old = copy.deepcopy(net.state_dict())
for step in range(1, {steps} + 1):
    is_here, is_cause = step == {cause}, step == {cause} and rank == {culprit}
    x = batches[step]
{before}
    optimizer.zero_grad()
{backward}
{after}
    optimizer.step()
    if step == {cause} - 3: old = copy.deepcopy(net.state_dict())
"""
OPTIMIZERS = ("SGD(groups, lr=0.05)", "SGD(groups, lr=0.05, momentum=0.9)", "Adam(groups, lr=0.01)",
              "AdamW(groups, lr=0.01)", "SGD(groups, lr=0.02)")  # fmt: skip
BACKWARD = "model(x).square().mean().backward()"
PARAMETERS = "0.weight", "1.weight", "1.bias", "4.weight", "4.bias"
ALL = frozenset(PARAMETERS)


@dataclass(frozen=True)
class Kind:
    """A kind of divergence: code for a step on a single rank or all; `parts` are those that differ.

    "one" is a parameter that the seed chooses; `told` is the earlier fact that must be reported.
    """

    model: str
    before: str = ""
    after: str = ""
    backward: str = BACKWARD
    parts: str = "all"
    told: str = "none of these"
    shift: int = 0


REPLICA, PARALLEL, PLAIN = "net", "DDP(net)", "(net)"
FLIP = """
if is_cause:
    bits = net.get_parameter({part!r}).data.view(torch.int32).reshape(-1)
    bits[{element} % bits.numel()] ^= 1 << {bit}
"""
KINDS = {
    "RNG": Kind(REPLICA, "if is_cause: torch.rand(1)", told="random state of torch"),
    "data order": Kind(
        REPLICA,
        "if is_cause:\n    both = [step, step + 1]\n    batches[both] = batches[both[::-1]]\n"
        "    x = batches[step]",
        told="the data",
    ),
    "bit flip": Kind(PARALLEL, FLIP, parts="one"),
    "skipped sync": Kind(
        PLAIN,
        backward=BACKWARD + "\nfor n, p in net.named_parameters():\n    g = p.grad.clone() if"
        " is_cause and n == {part!r} else p.grad\n    dist.all_reduce(g)",
        parts="one",
    ),
    "dropout seed": Kind(
        REPLICA, "if is_cause: torch.manual_seed(77)", told="random state of torch"
    ),
    "buffer not broadcast": Kind(
        PARALLEL, "if is_here: model.broadcast_buffers = False", parts="buffers", shift=-1
    ),
    "wrong parameter group": Kind(
        PARALLEL, "if is_cause: optimizer.param_groups[1]['lr'] *= 3", parts="group"
    ),
    "gradient scaled": Kind(
        PARALLEL, after="if is_cause: net.get_parameter({part!r}).grad *= 1.5", parts="one"
    ),
    "uneven batch": Kind(REPLICA, "if is_cause: x = x[:7]", told="shapes of the data"),
    "stale weights after a restore": Kind(PARALLEL, "if is_cause: net.load_state_dict(old)"),
}


@dataclass(frozen=True)
class Case:
    """A seeded divergence: its training, and the facts that must be reported."""

    kind: str
    seed: int
    ranks: int
    source: str
    step: int
    culprit: int | None
    parts: frozenset[str]
    told: str


def case_of(name: str, seed: int) -> Case:
    """Make the case of a kind and a seed."""
    kind, chosen = KINDS[name], random.Random(f"{name} {seed}")
    ranks = 2 if seed == 0 else 4
    cause, culprit = chosen.randrange(5, STEPS - 5), chosen.randrange(ranks)
    part = PARAMETERS[seed] if kind.parts == "one" else ""
    model, backward, for_all = kind.model, kind.backward, False
    if name == "skipped sync" and seed % 2:  # all ranks skip all collectives of a step
        model, for_all = PARALLEL, True
        backward = f"if is_here:\n    with model.no_sync(): {BACKWARD}\nelse: {BACKWARD}"
    holes = {"part": part, "element": chosen.randrange(10_000), "bit": chosen.randrange(12, 22)}

    def filled(text: str) -> str:
        return indent(text.format(**holes), "    ")

    is_replica = model == REPLICA
    source = MODEL.format(
        **{"seed": seed, "model": model, "steps": STEPS, "cause": cause, "culprit": culprit},
        norm="LayerNorm" if model == PLAIN else "BatchNorm1d",
        optimizer=OPTIMIZERS[0 if kind.parts == "one" else seed],
        data=seed if is_replica else f"{seed} + 100 * rank",
        before=filled(kind.before) or "    pass",
        backward=filled(backward),
        after=filled(kind.after) or "    pass",
    )
    if not is_replica:
        source = source.replace("batches =", "torch.manual_seed(10 + rank)\nbatches =")
    step = -(-(cause + kind.shift) // EVERY) * EVERY
    parts = {
        "all": ALL, "one": frozenset([part]), "group": frozenset(["4.weight", "4.bias"]),
        "buffers": frozenset(["1.running_mean", "1.running_var"]),
    }[kind.parts]  # fmt: skip
    whose = None if for_all or kind.parts == "buffers" or ranks == 2 else culprit
    return Case(name, seed, ranks, source, step, whose, ALL if for_all else parts, kind.told)


def watched(world: World, source: str, wanted: list[str], key: str) -> Divergence:
    """Run a training under a watch; return the divergence."""
    exchange = key, range(world.size), False
    world.call("watch.begin", expressions=wanted, every=EVERY, exchange=exchange)
    world.execute(source)
    return Divergence(wanted, dict(enumerate(world.call("watch.end"))))


def verdict(case: Case, found: Divergence) -> str:
    """Return the mistakes of the report, "" for none."""
    if not found.differs:
        return found.agreement()
    named = {path.removeprefix("module.") for path, _, _ in comparison(found, "net")}
    before = "\n".join(found.facts_before())
    wrong = []
    if found.step != case.step:
        wrong.append(f"step {found.step}, not {case.step}")
    if named != case.parts:
        wrong.append(f"parts {sorted(named)}")
    if case.culprit is not None and not f" {found.head()}".startswith(
        f" watch: after step {found.step} rank {case.culprit} differs"
    ):
        wrong.append(f"{found.head()}, not rank {case.culprit}")
    # Ranks that skip collectives have begun fewer of them, which may be reported.
    if f"  {case.told}" not in before and "all ranks began fewer collectives" not in before:
        wrong.append(f"told {before}")
    return "; ".join(wrong)


def comparison(found: Divergence, title: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a watched expression by its title."""
    for each in found.comparisons():
        if each.title == title:
            yield from each.rows()


# --- sound trainings --------------------------------------------------------------------------

LOOP = """
torch.manual_seed(10 + rank)
for step in range(1, 31):
    x = torch.randn(12, 8)
{body}
"""
STEP = "model(x).square().mean().backward()\noptimizer.step()\noptimizer.zero_grad()"
NET = """
import copy, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
torch.manual_seed({seed})
net = nn.Sequential(nn.Linear(8, 16), {norm}, nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
"""
BN, LN = "nn.BatchNorm1d(16)", "nn.LayerNorm(16)"
DDP_SGD = "model = DDP(net)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.05)"


def _with(optimizer: str, model: str = "DDP(net)") -> str:
    return f"model = {model}\noptimizer = torch.optim.{optimizer}"


SOUND = {
    "DDP, SGD": (LN, DDP_SGD, STEP),
    "DDP, momentum": (LN, _with("SGD(model.parameters(), lr=0.05, momentum=0.9)"), STEP),
    "DDP, Adam": (LN, _with("Adam(model.parameters())"), STEP),
    "DDP, AdamW, fused": (LN, _with("AdamW(model.parameters(), fused=True)"), STEP),
    "DDP, BatchNorm": (BN, DDP_SGD, STEP),
    "DDP, BatchNorm, evaluation by DDP": (
        BN, DDP_SGD,
        STEP + "\nif step % 5 == 0:\n    model.eval()\n    with torch.no_grad(): model(x)\n"
        "    model.train()",
    ),
    "DDP, BatchNorm, evaluation beside DDP": (
        BN, DDP_SGD,
        STEP + "\nif step % 5 == 0:\n    net.eval()\n    with torch.no_grad(): net(x)\n"
        "    net.train()",
    ),
    "DDP, accumulation": (
        BN, DDP_SGD,
        "with model.no_sync():\n    model(x).square().mean().backward()\n" + STEP,
    ),
    "DDP, bf16": (
        LN, DDP_SGD,
        "with torch.autocast('cpu', torch.bfloat16): loss = model(x).square().mean()\n"
        "loss.backward()\noptimizer.step()\noptimizer.zero_grad()",
    ),
    "DDP, bf16, BatchNorm": (
        BN, DDP_SGD,
        "with torch.autocast('cpu', torch.bfloat16): loss = model(x).square().mean()\n"
        "loss.backward()\noptimizer.step()\noptimizer.zero_grad()",
    ),
    "DDP, gradients kept as zeros": (
        BN, DDP_SGD, STEP.replace("zero_grad()", "zero_grad(set_to_none=False)")
    ),
    "DDP, zero_grad by the model": (
        LN, DDP_SGD, STEP.replace("optimizer.zero_grad()", "model.zero_grad()")
    ),
    "DDP, clipped, schedule": (
        LN,
        DDP_SGD + "\nschedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)",
        "model(x).square().mean().backward()\nnn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
        "optimizer.step()\nschedule.step()\noptimizer.zero_grad()",
    ),
    "DDP, static graph": (LN, DDP_SGD.replace("(net)", "(net, static_graph=True)"), STEP),
    "DDP, unused parameters": (
        LN, "net.more = nn.Linear(3, 3)\nnet.forward = lambda x: net[4](net[2](net[0](x)))\n"
        + DDP_SGD.replace("(net)", "(net, find_unused_parameters=True)"), STEP,
    ),
    "DDP, uneven batches": (LN, DDP_SGD, "x = x[: 3 + rank]\n" + STEP),
    "averaged by hand": (
        LN, "model = net\noptimizer = torch.optim.Adam(model.parameters())",
        "model(x).square().mean().backward()\n"
        "for p in model.parameters(): dist.all_reduce(p.grad)\noptimizer.step()\n"
        "optimizer.zero_grad()",
    ),
    "FSDP2, SGD": (
        LN, "model = fully_shard(net)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.05)",
        STEP,
    ),
    "FSDP2, AdamW, layers": (
        LN, "for layer in (net[0], net[4]): fully_shard(layer)\nmodel = fully_shard(net)\n"
        "optimizer = torch.optim.AdamW(model.parameters())", STEP,
    ),
    "ZeRO, optimizer sharded": (
        LN, "from torch.distributed.optim import ZeroRedundancyOptimizer as Zero\n"
        "model = DDP(net)\n"
        "optimizer = Zero(model.parameters(), optimizer_class=torch.optim.Adam)", STEP,
    ),
}  # fmt: skip


def sound_source(name: str, seed: int) -> str:
    """Return the source of a sound training."""
    norm, made, body = SOUND[name]
    return NET.format(seed=seed, norm=norm) + made + LOOP.format(body=indent(body, "    "))


# --- the watch's cost -------------------------------------------------------------------------

LARGE = """
import time, torch.nn as nn
layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
layers = nn.TransformerEncoder(layer, 12), nn.Linear(768, 300)
big = nn.Sequential(nn.Embedding(20_000, 768), *layers)
adamw = torch.optim.AdamW(big.parameters())
tokens = torch.randint(20_000, (2, 64))
def one():
    big(tokens).square().mean().backward()
    adamw.step()
    adamw.zero_grad()
def timed(n):
    begin = time.perf_counter()
    for _ in range(n): one()
    return (time.perf_counter() - begin) / n
one()
size = sum(p.numel() for p in big.parameters())
"""


def cost(world: World) -> None:
    """Print the seconds of a step of 100 M parameters, and of a watch's look at the parameters."""
    world.execute(LARGE, ranks=[0])
    step = float(value_of(world, "timed(3)"))
    size = int(value_of(world, "size"))
    for wanted in (["big"], ["big", "adamw"]):
        world.call(
            "watch.begin",
            ranks=[0],
            expressions=wanted,
            every=1,
            exchange=("cost", range(9), False),
        )
        look = (
            "from nbdist.tools import watch_op\nwatch = watch_op._watches[-1]\nlooks = []\n"
            "for _ in range(4):\n    begin = time.perf_counter()\n    watch._compare_step()\n"
            "    looks.append(time.perf_counter() - begin)\nmin(looks)"
        )
        world.execute(look, ranks=[0])
        took = float(value_of(world, "min(looks)"))
        sys.stdout.write(
            f"{size / 1e6:.0f} M parameters, {' and '.join(wanted)}: a step {step:.3f} s, a look "
            f"{took * 1000:.0f} ms, {took / 50 / step:.2%} of a step with --every 50\n"
        )


def value_of(world: World, expression: str) -> float:
    """Evaluate an expression on rank 0."""
    found: float = world.gather(expression, rank=0)
    return found


def main() -> None:
    """Run all trainings, and print the mistakes of the reports."""
    named = alarms = 0
    began = time.monotonic()
    for ranks in (2, 4):
        with World(ranks, log_dir="") as world:
            for case in (case_of(name, seed) for name in KINDS for seed in range(5)):
                if case.ranks != ranks:
                    continue
                found = watched(world, case.source, ["net", "optimizer"], f"{case.kind}{case.seed}")
                wrong = verdict(case, found)
                named += not wrong
                sys.stdout.write(f"{case.kind} {case.seed}: {wrong or 'named'}\n")
                sys.stdout.flush()
            for seed, name in enumerate(SOUND if ranks == 4 else ()):
                found = watched(world, sound_source(name, seed), ["model", "optimizer"], name)
                alarms += found.differs
                said = (
                    "\n".join([found.head(), *found.facts_before()])
                    if found.differs
                    else found.agreement()
                )
                sys.stdout.write(f"sound, {name}: {said}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{named} of 50 named, {alarms} false alarms of {len(SOUND)}; "
                     f"{time.monotonic() - began:.0f} s\n")  # fmt: skip
    with World(2, log_dir="") as world:
        cost(world)


if __name__ == "__main__":
    main()
