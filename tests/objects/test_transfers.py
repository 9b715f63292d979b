"""Values are copied into the objects that a side already has, and all references stay linked."""

from __future__ import annotations

import signal

import pytest

from tests.objects.programs import (
    Run,
    Step,
    gives,
    gives_here,
    here,
    hinting,
    holds,
    holds_here,
    ranks,
    table,
)

pytestmark = [pytest.mark.shared_world, pytest.mark.kernel]

MODEL = "model = net(); optimizer = sgd(model)"
TRAIN = "print(train(model, optimizer))"
DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\nddp = DDP(model)"
LINKED = "optimizer.param_groups[0]['params'][0] is model.weight"
JOBS = "cfg = {'lr': .1}; jobs = [cfg]"
KILL = f"import os\nif rank == 1: os.kill(os.getpid(), {int(signal.SIGKILL)})\ndist.barrier()"


def told(step: Step) -> Step:
    """Return the step of a command that may show any lines."""
    return hinting(step)


GATHER: dict[str, list[Step]] = {
    "gathered under another name": [
        here(MODEL),
        ranks(f"{DDP}\n{TRAIN}"),
        told(here("%dist_gather model -r 0 --as trained")),
        gives_here("round(loss_of(trained).item(), 3), round(loss_of(model).item())", (0.605, 100)),
        gives("train(ddp, optimizer), ddp.module is model", (0.004, True)),
    ],
    "gathered under its own name": [
        here(MODEL),
        ranks(f"{DDP}\n{TRAIN}"),
        told(here("%dist_gather model -r 0")),
        gives_here("round(loss_of(model).item(), 3)", 0.605),
        gives("train(ddp, optimizer), ddp.module is model", (0.004, True)),
        here("more = [optimizer]"),
        gives("more[0] is optimizer, train(model, more[0])", (True, 0.0)),
    ],
    "gathered and changed here": [
        here(JOBS),
        ranks("cfg['r'] = rank"),
        told(here("%dist_gather cfg -r 1")),
        here("cfg['here'] = 1"),
        gives("cfg, jobs[0] is cfg", ({"lr": 0.1, "r": 0}, True), ({"lr": 0.1, "r": 1}, True)),
    ],
    "a gathered value that is pushed": [
        here(JOBS),
        ranks("cfg['r'] = rank; print(jobs)"),
        told(here("%dist_gather cfg -r 1\n%dist_push cfg")),
        gives("cfg['r']", 1),
    ],
    "a part of a gathered value is pushed": [
        ranks("b = {'r': rank}; f = 'own'"),
        told(here("%dist_gather b --as f")),
        here("b2 = f[0]"),
        told(here("%dist_push b2")),
        gives("f, b2", ("own", {"r": 0})),
    ],
    "equal values of two ranks are equal here": [
        here("@dataclass\nclass D:\n    n: int\nclass C(enum.Enum):\n    RED = 1"),
        ranks("d, c = D(1), C.RED"),
        told(here("%dist_gather d c")),
        gives_here(
            "d[0] == d[1] == D(1), c[0] is c[1] is C.RED, type(d[0]) is D", (True, True, True)
        ),
    ],
    "equal values of classes of the ranks are equal here": [
        ranks(
            "@dataclass\nclass D:\n    n: int\nclass C(enum.Enum):\n    RED = 1\nd, c = D(1), C.RED"
        ),
        told(here("%dist_gather d c")),
        gives_here("d[0] == d[1], c[0] is c[1]", (True, True)),
    ],
}

PUSH: dict[str, list[Step]] = {
    "a trained model": [
        here(MODEL),
        ranks(f"{DDP}\n{TRAIN}"),
        told(here("%dist_push model")),
        gives("ddp.module is model, round(loss_of(ddp).item())", (True, 100)),
        gives(f"train(ddp, optimizer), {LINKED}", (0.605, True)),
    ],
    "a config in jobs": [
        here(JOBS),
        ranks("jobs[0]['lr'] = .5; kept = cfg"),
        told(here("%dist_push cfg")),
        gives("jobs, jobs[0] is cfg is kept", ([{"lr": 0.1}], True)),
        here("cfg['n'] = 1"),
        gives("kept", {"lr": 0.1, "n": 1}),
    ],
    "the container of what was changed": [
        here(JOBS),
        ranks("cfg['lr'] = .5; print(jobs)"),
        told(here("%dist_push jobs")),
        gives("jobs[0] is cfg, cfg", (True, {"lr": 0.1})),
    ],
    "an optimizer alone": [
        here("model = net(); optimizer = sgd(model, momentum=.9)"),
        ranks(TRAIN),
        told(here("%dist_push optimizer")),
        holds(LINKED),
        gives("len(optimizer.state)", 0),
        ranks("before = loss_of(model).item(); train(model, optimizer, 1)"),
        holds("loss_of(model).item() != before"),
    ],
    "a class": [
        here("class CFG: lr = .1\nc = CFG()"),
        ranks("CFG.lr = .5; kept = CFG; print(c)"),
        told(here("%dist_push CFG")),
        gives("kept.lr, c.lr, CFG is kept", (0.1, 0.1, True)),
    ],
    "a tensor under views": [
        here("t = torch.zeros(4)"),
        ranks("v = t[1:]; t += 1"),
        told(here("%dist_push t")),
        gives("v.tolist(), t.data_ptr() + 4 == v.data_ptr()", ([0, 0, 0], True)),
    ],
    "what has another structure": [
        here("model = net()"),
        ranks(DDP),
        here("model = net(3)"),
        hinting(here("%dist_push model"), "ddp"),
        gives("model.weight.shape[1], ddp.module is model", (3, False)),
    ],
    "on one rank": [
        here(JOBS),
        ranks("cfg['lr'] = .5; print(jobs)"),
        told(here("%dist_push cfg -r 1")),
        gives("jobs[0] is cfg, cfg['lr']", (True, 0.5), (True, 0.1)),
    ],
    "on one rank, and then used on all": [
        here("l = [1]"),
        told(here("%dist_push l -r 1")),
        gives("l", [1], [1]),
        ranks("l.append(2)"),
        told(here("%dist_push l -r 0")),
        gives("l", [1], [1, 2]),
    ],
    "after a conflict": [
        here("l = [0]"),
        ranks("l.append(rank); mine = [l]"),
        here("l.append(5)"),
        hinting(ranks("print(l)"), "%dist_push l"),
        told(here("%dist_push l")),
        gives("l, mine[0] is l", ([0, 5], True)),
        here("l.append(6)"),
        gives("mine", [[0, 5, 6]]),
    ],
    "a name of the ranks": [
        here("x = [1]"),
        ranks("x = {'theirs': 1}; mine = x"),
        told(here("%dist_push x")),
        gives("x, mine", ([1], {"theirs": 1})),
        here("x.append(2)"),
        gives("x", [1, 2]),
    ],
    "scattered parts": [
        here("batch = [1, 2, 3, 4]; data = {'batch': batch}"),
        ranks("data['n'] = 1"),
        told(here("%dist_scatter batch")),
        gives("batch", [1, 2], [3, 4]),
        gives("data['n'], data['batch']", (1, [1, 2, 3, 4])),
    ],
}

SYNC: dict[str, list[Step]] = {
    "to all": [
        here(MODEL),
        ranks(f"{DDP}\nif rank:\n    with torch.no_grad(): model.weight += 7\n{TRAIN}"),
        told(here("%dist_sync model --from 0 -r all")),
        gives(f"ddp.module is model, {LINKED}", (True, True)),
        holds("train(model, optimizer) < 2"),
        ranks("weight = model.weight.tolist()"),
        told(here("%dist_gather weight")),
        holds_here("weight[0] == weight[1]"),
    ],
    "training goes on after it": [
        here(MODEL),
        ranks(TRAIN),
        told(here("%dist_sync model --from 0 -r all")),
        gives(f"train(model, optimizer), {LINKED}", (0.004, True)),
        here("more = [model, optimizer]"),
        gives("more[0] is model, train(model, more[1])", (True, 0.0)),
    ],
    "an optimizer and its model, one by one": [
        here("model = net(); optimizer = torch.optim.Adam(model.parameters(), lr=.1)"),
        ranks("if rank == 0: train(model, optimizer)\nprint(len(optimizer.state))"),
        told(here("%dist_sync model --from 0 -r all")),
        told(here("%dist_sync optimizer --from 0 -r all")),
        gives(
            f"{LINKED}, len(optimizer.state), [*optimizer.state][0] is model.weight",
            (True, 1, True),
        ),
    ],
    "what ranks made": [
        ranks(
            "model = net(); optimizer = sgd(model)\n"
            "if rank:\n    with torch.no_grad(): model.weight += 1"
        ),
        told(here("%dist_sync model --from 0 -r all")),
        gives(f"train(model, optimizer), {LINKED}", (0.605, True)),
    ],
    "a config in jobs, to all": [
        here(JOBS),
        ranks("cfg['r'] = rank; print(jobs)"),
        told(here("%dist_sync cfg --from 1 -r all")),
        gives("jobs, jobs[0] is cfg", ([{"lr": 0.1, "r": 1}], True)),
    ],
    "other structures": [
        ranks("x = [rank] * (1 + rank); mine = x"),
        told(here("%dist_sync x --from 1 -r all")),
        gives("x, mine is x", ([1, 1], True)),
    ],
}

DEATHS: dict[str, list[Step]] = {
    "a rank dies, model and optimizer one by one": [
        here(MODEL),
        ranks(TRAIN),
        ranks(KILL, fails="model"),
        told(here("%dist_sync model --from 0")),
        told(here("%dist_sync optimizer --from 0")),
        gives(f"train(model, optimizer), {LINKED}", (0.004, True)),
    ],
    "a rank dies, optimizer before model": [
        here(MODEL),
        ranks(TRAIN),
        ranks(KILL, fails="optimizer"),
        told(here("%dist_sync optimizer --from 0")),
        told(here("%dist_sync model --from 0")),
        gives(f"train(model, optimizer), {LINKED}", (0.004, True)),
    ],
    "a rank dies, both at once": [
        here(MODEL),
        ranks(TRAIN),
        ranks(KILL, fails="model"),
        told(here("%dist_sync model optimizer --from 0")),
        gives(f"train(model, optimizer), {LINKED}", (0.004, True)),
        here("again = {'m': model}"),
        gives("again['m'] is model, train(again['m'], optimizer)", (True, 0.0)),
    ],
    "a rank is restarted": [
        here(MODEL),
        ranks(TRAIN),
        hinting(here("%dist_restart -r 1"), "model", "optimizer"),
        told(here("%dist_sync model --from 0")),
        told(here("%dist_sync optimizer --from 0")),
        gives(f"train(model, optimizer), {LINKED}", (0.004, True)),
    ],
    "a rank dies that has only what the notebook has": [
        here(JOBS),
        ranks("print(cfg, jobs)"),
        ranks(KILL, fails="killed"),
        gives("jobs, jobs[0] is cfg", ([{"lr": 0.1}], True)),
        here("cfg['lr'] = .2"),
        gives("jobs, jobs[0] is cfg", ([{"lr": 0.2}], True)),
    ],
    "what came with the cell in which a rank dies is named, if other ranks have changed it": [
        here("hist = []; untouched = [1]"),
        ranks(f"hist.append(rank); print(untouched)\n{KILL}", fails=r"variables \(hist\) are gone"),
    ],
    "what was changed in place is named": [
        here("hist = []; untouched = [1]"),
        ranks("hist.append(rank); print(untouched)"),
        ranks(KILL, fails=r"variables \(hist\) are gone"),
    ],
}

DELETED: dict[str, list[Step]] = {
    "a small list that the ranks have replaced is no longer compared": [
        here("hist = [1]"),
        ranks("hist.append(rank)"),
        told(here("whole = [2, 3]\n%dist_scatter whole --as hist")),
        told(here("hist.append(4)")),
        gives("hist", [2], [3]),
    ],
    "a small list is gone, and comes anew": [
        here("hist = [1]"),
        ranks("hist.append(2)\ndel hist"),
        gives("[name for name in globals() if name == 'hist']", []),
        gives("hist", [1]),
        ranks("del hist"),
        gives("[name for name in globals() if name == 'hist']", []),
    ],
}

SIZES: dict[str, list[Step]] = {
    "a rank more": [
        here(MODEL),
        ranks(TRAIN),
        told(here("%dist_scale 3")),
        told(here("%dist_sync model --from 0")),
        told(here("%dist_sync optimizer --from 0")),
        gives(f"train(model, optimizer), {LINKED}", (0.004, True)),
    ],
    "a rank more for what the notebook has": [
        here(JOBS),
        ranks("print(cfg, jobs)"),
        told(here("%dist_scale 3")),
        here("cfg['lr'] = .2"),
        gives("jobs, jobs[0] is cfg", ([{"lr": 0.2}], True)),
    ],
    "a rank less": [
        here(MODEL),
        ranks(TRAIN),
        told(here("%dist_scale 1")),
        gives(f"train(model, optimizer), {LINKED}", (0.004, True)),
        here("more = [optimizer]"),
        gives("more[0] is optimizer, train(model, more[0])", (True, 0.0)),
    ],
    "what is gone is named": [
        here("hist = []"),
        ranks("hist.append(rank)"),
        hinting(here("%dist_scale 3"), "hist"),
    ],
    "kept over a restart": [
        here(MODEL),
        ranks(TRAIN),
        told(here("%dist_restart --keep model")),
        gives(f"train(model, optimizer), {LINKED}", (0.004, True)),
    ],
    "an optimizer kept over a restart": [
        here(MODEL),
        ranks(TRAIN),
        told(here("%dist_restart --keep optimizer,model")),
        gives(f"train(model, optimizer), {LINKED}", (0.004, True)),
    ],
    "not kept": [
        here(MODEL),
        ranks(TRAIN),
        told(here("%dist_restart")),
        gives(f"train(model, optimizer), {LINKED}", (0.605, True)),
    ],
    "the extension is loaded again": [
        here(MODEL),
        ranks(TRAIN),
        told(here("%reload_ext nbdist")),
        gives(f"train(model, optimizer), {LINKED}", (0.004, True)),
    ],
}

SNAPSHOTS: dict[str, list[Step]] = {
    "over a restart": [
        here(f"{MODEL}; hist = []"),
        ranks("hist.append(train(model, optimizer))"),
        told(here("%dist_snapshot --name over")),
        told(here("%dist_restart")),
        told(here("%dist_restore --name over")),
        gives(f"hist, train(model, optimizer), {LINKED}", ([0.605], 0.004, True)),
    ],
    "into what is there": [
        here(f"{MODEL}; hist = []"),
        ranks(f"{DDP}\nhist.append(train(model, optimizer)); kept = hist"),
        told(here("%dist_snapshot model optimizer hist --name there")),
        ranks(f"{TRAIN}\nhist.append(1)"),
        told(here("%dist_restore --name there")),
        gives(f"hist, kept is hist, ddp.module is model, {LINKED}", ([0.605], True, True, True)),
        gives("train(ddp, optimizer)", 0.004),
    ],
    "lists of classes and defaults of functions": [
        here(f"{MODEL}\nclass C: reg = []\ndef f(x=[]): return x"),
        ranks("C.reg.append(model); f().append(model); kept = [C.reg]"),
        told(here("%dist_snapshot --name held")),
        ranks(TRAIN),
        told(here("%dist_restore --name held")),
        gives("C.reg[0] is model, f()[0] is model, kept[0] is C.reg", (True, True, True)),
        told(here("hist = [1]")),
        told(ranks("hist.append(2)")),
        told(here("%dist_snapshot hist --name again")),
        told(here("%dist_restore hist --name again")),
        here("hist.append('n')"),
        hinting(gives("hist", [1, 2]), "`hist`", "%dist_push hist"),
    ],
    "the model alone": [
        here(MODEL),
        ranks(f"{DDP}\n{TRAIN}"),
        told(here("%dist_snapshot --name alone")),
        ranks(TRAIN),
        told(here("%dist_restore model --name alone")),
        gives(f"ddp.module is model, {LINKED}", (True, True)),
        gives("train(ddp, optimizer)", 0.004),
    ],
    "names that begin with an underscore": [
        here("_hist = []"),
        ranks("_hist.append(rank); _own = rank"),
        told(here("%dist_snapshot --name under")),
        told(here("%dist_restart")),
        told(here("%dist_restore --name under")),
        gives("_hist, _own", ([0], 0), ([1], 1)),
    ],
    "what the ranks have not changed is the notebook's": [
        here("a, b = [1], [2]"),
        ranks("a.append(rank); print(b)"),
        told(here("%dist_snapshot --name part")),
        told(here("%dist_restart")),
        told(here("%dist_restore --name part")),
        here("b.append(3)"),
        gives("a, b", ([1, 0], [2, 3]), ([1, 1], [2, 3])),
    ],
}

SOME_RANKS: dict[str, list[Step]] = {
    "one rank first": [
        here(MODEL),
        ranks("print(model.weight.sum().item())", options="-r 0"),
        gives(f"train(model, optimizer), {LINKED}", (0.605, True)),
    ],
    "one rank has trained": [
        here(MODEL),
        ranks(TRAIN, options="-r 0"),
        told(ranks("print(train(model, optimizer))", options="-r 0")),
        told(ranks(TRAIN, options="-r 1")),
        told(ranks(f"assert {LINKED}")),
        hinting(gives("round(loss_of(model).item(), 3)", 0.004, 0.605)),
    ],
    "the notebook changes in between": [
        here(JOBS),
        ranks("print(cfg)", options="-r 0"),
        here("cfg['lr'] = .2"),
        ranks("print(jobs)", options="-r 1"),
        gives("jobs, jobs[0] is cfg", ([{"lr": 0.2}], True)),
        here("cfg['lr'] = .3"),
        gives("jobs, jobs[0] is cfg", ([{"lr": 0.3}], True)),
    ],
    "parts that other ranks have": [
        here("a, b = [1], [2]"),
        ranks("a.append(rank)", options="-r 0"),
        ranks("b.append(rank)", options="-r 1"),
        here("c = [a, b]"),
        hinting(gives("c[0][:1], c[1][:1]", ([1], [2]))),
        hinting(
            gives(
                "(c[0], a is c[0]) if rank == 0 else (c[1], b is c[1])",
                ([1, 0], True),
                ([2, 1], True),
            )
        ),
    ],
    "a name that one rank has bound": [
        here("x = [1]"),
        ranks("x = 'own'", options="-r 0"),
        hinting(ranks("print(x) if rank == 0 else None")),
        hinting(gives("x if rank == 0 else 'own'", "own")),
    ],
    "a name that one rank has deleted": [
        here("a = [1]; b = [a]"),
        ranks("print(a, b)\nif rank == 1: del a, b"),
        here("b.append(2)"),
        gives("b, b[0]", ([[1], 2], [1])),
    ],
}

WAYS: dict[str, list[Step]] = {
    "a cell that does not wait": [
        here("l = [0]"),
        ranks("l.append(rank)", options="--no-wait"),
        here("m = [l]"),
        gives("m[0] is l, l", (True, [0, 0]), (True, [0, 1])),
    ],
    "the notebook assigns what a job binds": [
        here("x = [0]; import time"),
        ranks("time.sleep(.3); x = 'job'", options="--no-wait"),
        here("x = 'notebook'"),
        hinting(ranks("x"), "`x`"),
    ],
    "the notebook changes what a job uses": [
        here("l = [0]; import time"),
        ranks("seen = [*l]; time.sleep(.3); seen += l", options="--no-wait"),
        here("l.append(1)"),
        gives("seen, l", ([0, 0], [0, 1])),
    ],
    "auto mode": [
        here(MODEL),
        here("%dist_auto on"),
        here(DDP),
        here("assert train(ddp, optimizer) == 0.605"),
        here("%%local\nscheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0)"),
        here("assert scheduler.optimizer is optimizer\nassert train(ddp, optimizer) == 0.004"),
        here("%dist_auto off"),
        gives(f"train(model, optimizer), ddp.module is model, {LINKED}", (0.0, True, True)),
    ],
    "another pool": [
        here(JOBS),
        ranks("cfg['lr'] = .5; print(jobs)"),
        told(
            ranks(
                "assert cfg == {'lr': .1} and jobs[0] is cfg; cfg['other'] = 1",
                options="--pool other -n 1",
            )
        ),
        gives("jobs, jobs[0] is cfg", ([{"lr": 0.5}], True)),
        told(ranks("assert jobs == [{'lr': .1, 'other': 1}]", options="--pool other")),
        told(here("%dist_shutdown --pool other")),
    ],
    "a cell that fails": [
        here(JOBS),
        ranks("cfg['lr'] = .5; raise ValueError('x')", fails="ValueError"),
        gives("jobs, jobs[0] is cfg", ([{"lr": 0.5}], True)),
    ],
    "a cell that cannot be sent whole": [
        here("import threading\na = [1]; lock = [threading.Lock()]"),
        ranks("print(a)"),
        here("a.append(2)"),
        ranks("print(a, lock)", fails="`lock`"),
        gives("a", [1, 2]),
        here("lock = []; b = [a]"),
        gives("b[0] is a, a, lock", (True, [1, 2], [])),
    ],
    "an object that knows its process": [
        here("from accelerate import Accelerator\nacc = Accelerator(cpu=True)"),
        ranks("print(acc.num_processes)", fails=r"`acc`.*inside the cell"),
    ],
}

TABLES = {
    "gather": GATHER,
    "push": PUSH,
    "sync": SYNC,
    "death": DEATHS,
    "deleted": DELETED,
    "size": SIZES,
    "snapshot": SNAPSHOTS,
    "ranks": SOME_RANKS,
    "way": WAYS,
}
CASES = {
    f"{kind}: {name}": steps for kind, cases in TABLES.items() for name, steps in cases.items()
}


@table(CASES)
def test_commands_keep_references_linked(program: Run, name: str) -> None:
    """Commands copy into existing objects; wrappers, optimizers and aliases stay linked."""
    program(CASES[name])
