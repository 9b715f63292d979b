"""Models stay linked to their optimizers, wrappers and helpers, whichever cell sends them."""

from __future__ import annotations

import re

import pytest

from tests.objects.programs import (
    Run,
    Step,
    gives,
    here,
    hinting,
    holds,
    is_plain,
    on_ranks,
    ranks,
    run_in_one_process,
    table,
)

pytestmark = pytest.mark.shared_world

MODEL = "model = net(); optimizer = sgd(model)"
"""Trained by `train` in steps of five, the loss is 0.605, 0.004, 0.0."""

DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\nddp = DDP(model)"

CASES: dict[str, list[Step]] = {
    "a wrapper of the ranks and an optimizer that is sent later": [
        here(
            "model = torch.nn.Linear(2, 1, bias=False); torch.nn.init.zeros_(model.weight)\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=.1)\n"
            "def learn():\n"
            "    for _ in range(5):\n"
            "        optimizer.zero_grad(); loss_of(ddp).backward(); optimizer.step()\n"
            "    return round(loss_of(ddp).item(), 3)"
        ),
        ranks(DDP),
        gives("learn()", 0.605),
        gives("learn()", 0.004),
        gives("learn()", 0.0),
        holds("ddp.module is model"),
        holds("optimizer.param_groups[0]['params'][0] is model.weight"),
    ],
    "a forward, then the optimizer": [
        here(MODEL),
        ranks("print(model(torch.ones(4, 2)).shape)"),
        ranks("model(torch.ones(1, 2)).sum().backward(); optimizer.step()"),
        gives("model.weight.tolist()", [[pytest.approx(-0.1)] * 2]),
    ],
    "eval, then the optimizer": [
        here(MODEL),
        ranks("model.eval()"),
        gives("train(model, optimizer), model.training", (0.605, False)),
    ],
    "trained, then an optimizer of the notebook": [
        here("model = net()"),
        ranks("o = sgd(model); print(train(model, o))"),
        here("optimizer = sgd(model)"),
        gives("train(model, optimizer)", 0.004),
    ],
    "what the ranks made, after the notebook has put the model into eval": [
        here("model = net()"),
        ranks("o = sgd(model)"),
        here("model.eval()"),
        gives("train(model, o), model.training", (0.605, False)),
    ],
    "what the ranks made, after the notebook has computed a forward": [
        here("model = net()"),
        ranks(f"o = sgd(model)\n{DDP}"),
        here("model(torch.ones(1, 2))"),
        gives("train(ddp, o)", 0.605),
        gives("train(model, o)", 0.004),
    ],
    "weights changed in the notebook, under a wrapper": [
        here("model = net()"),
        ranks(f"o = sgd(model)\n{DDP}"),
        here("with torch.no_grad(): model.weight += 1"),
        gives("model.weight.tolist()", [[1.0, 1.0]]),
        holds("ddp.module.weight is o.param_groups[0]['params'][0]"),
        gives("round(loss_of(ddp).item(), 3)", 64.0),
    ],
    "weights loaded in the notebook": [
        here(f"{MODEL}\nother = {{'weight': torch.ones(1, 2)}}"),
        ranks("ema = model.weight.data"),
        here("model.load_state_dict(other)"),
        gives("model.weight.tolist(), ema.tolist()", ([[1.0, 1.0]], [[1.0, 1.0]])),
        gives("train(model, optimizer, 1)", 23.04),
    ],
    "lr changed in the notebook before the ranks trained": [
        here(MODEL),
        ranks("len(optimizer.param_groups)"),
        here("optimizer.param_groups[0]['lr'] = 0"),
        gives("train(model, optimizer)", 100.0),
    ],
    "a frozen parameter": [
        here(MODEL),
        ranks("model.weight.requires_grad"),
        here("model.weight.requires_grad_(False)"),
        gives(
            "model.weight.requires_grad, model.weight is optimizer.param_groups[0]['params'][0]",
            (False, True),
        ),
    ],
    "a scheduler in a third cell": [
        here(MODEL),
        ranks("print(train(model, optimizer))"),
        here("scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0)"),
        ranks("optimizer.step(); scheduler.step()"),
        gives("optimizer.param_groups[0]['lr'], scheduler.optimizer is optimizer", (0.0, True)),
        gives("train(model, optimizer)", 0.067),
    ],
    "a scheduler that the notebook made before anything is sent": [
        here(f"{MODEL}; scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, .5)"),
        ranks("optimizer.step(); scheduler.step()"),
        gives("optimizer.param_groups[0]['lr'], scheduler.get_last_lr()", (0.05, [0.05])),
        holds("scheduler.optimizer is optimizer"),
    ],
    "a moving average": [
        here(
            "from torch.optim.swa_utils import AveragedModel\n"
            f"{MODEL}; ema = AveragedModel(model, avg_fn=lambda a, m, n: (a + m) / 2)"
        ),
        ranks("print(train(model, optimizer)); ema.update_parameters(model)"),
        ranks("print(train(model, optimizer)); ema.update_parameters(model)"),
        gives("round(loss_of(ema).item(), 2)", 0.18),
        gives("train(model, optimizer)", 0.0),
    ],
    "a scaler": [
        here(f"{MODEL}; scaler = torch.amp.GradScaler('cpu', init_scale=2.)"),
        ranks("print(train(model, optimizer))"),
        ranks(
            "optimizer.zero_grad(); scaler.scale(loss_of(model)).backward()\n"
            "scaler.step(optimizer); scaler.update()"
        ),
        gives("round(loss_of(model).item(), 3), scaler.get_scale()", (0.218, 2.0)),
    ],
    "a list of parameters and clipping": [
        here(f"{MODEL}; params = list(model.parameters())"),
        ranks("loss_of(model).backward()"),
        ranks("torch.nn.utils.clip_grad_norm_(params, 1.)"),
        gives("round(float(model.weight.grad.norm()), 3), params[0] is model.weight", (1.0, True)),
    ],
    "tied weights": [
        here(
            "class Tied(torch.nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.a, self.b = net(), net(); self.b.weight = self.a.weight\n"
            "    def forward(self, x): return (self.a(x) + self.b(x)) / 2\n"
            "model = Tied(); head = model.b; optimizer = sgd(model)"
        ),
        ranks("model.a.weight is model.b.weight"),
        gives("head.weight is model.a.weight, head is model.b", (True, True)),
        gives("train(model, optimizer)", 0.605),
        holds("head.weight.sum().item() > 9"),
    ],
    "a hook that fills a list": [
        here(
            f"{MODEL}; seen_norms = []\n"
            "def note(module, args, output): seen_norms.append(output.numel())\n"
            "handle = model.register_forward_hook(note)"
        ),
        ranks("print(train(model, optimizer, 2))"),
        gives("seen_norms", [1, 1, 1]),
        ranks("handle.remove(); print(train(model, optimizer, 2))"),
        gives("seen_norms, len(model._forward_hooks)", ([1, 1, 1], 0)),
    ],
    "a first hook, and later a second one, on a model that is there": [
        here("model = net(); model.seen = []"),
        ranks("model(torch.ones(1, 2))"),
        here("one = model.register_forward_hook(lambda module, *_: module.seen.append(1))"),
        gives("model(torch.ones(1, 2)).item(), model.seen", (0, [1])),
        here("two = model.register_forward_hook(lambda module, *_: module.seen.append(2))"),
        gives("model(torch.ones(1, 2)).item(), model.seen", (0, [1, 1, 2])),
        ranks("one.remove()"),
        gives("model(torch.ones(1, 2)).item(), model.seen", (0, [1, 1, 2, 2])),
    ],
    "a hook of the ranks stays when the notebook adds a buffer": [
        here("model = net(); model.seen = []"),
        ranks("handle = model.register_forward_hook(lambda module, *_: module.seen.append(rank))"),
        here("model.register_buffer('scale', torch.ones(1))"),
        gives(
            "model(torch.ones(1, 2)).item(), model.seen, model.scale.item()",
            *((0, [rank], 1.0) for rank in range(2)),
        ),
        ranks("handle.remove()"),
        gives("model(torch.ones(1, 2)).item(), model.seen", (0, [0]), (0, [1])),
    ],
    "a second variable for a model that is sent later": [
        here(f"{MODEL}; best = model"),
        ranks("print(train(model, optimizer))"),
        ranks("model = None"),
        gives("train(best, optimizer)", 0.004),
    ],
    "a second variable for a trained model, before the ranks make another model": [
        here(MODEL),
        ranks("print(train(model, optimizer))"),
        here("best = model"),
        ranks("model = net(); print(train(model, sgd(model), 1))"),
        gives("train(best, optimizer), best is model", (0.004, False)),
    ],
    "hooks of an optimizer": [
        here(
            f"{MODEL}; steps = []\n"
            "one = optimizer.register_step_post_hook(lambda *_: steps.append(1))"
        ),
        gives("train(model, optimizer, 2) > 0, steps", (True, [1, 1])),
        here("two = optimizer.register_step_pre_hook(lambda *_: steps.append(0))"),
        gives("train(model, optimizer, 1) > 0, steps", (True, [1, 1, 0, 1])),
        ranks("one.remove(); two.remove()"),
        gives("train(model, optimizer, 1) > 0, steps", (True, [1, 1, 0, 1])),
    ],
    "a variable for an empty table of a module": [
        here("model = net()"),
        ranks("model(torch.ones(1, 2))"),
        here("buffers = model._buffers"),
        holds("buffers is model._buffers"),
        here("model.register_buffer('scale', torch.ones(1))"),
        gives("buffers is model._buffers, [*buffers]", (True, ["scale"])),
    ],
    "a hook on a parameter of a model that is there": [
        here(MODEL),
        ranks("print(train(model, optimizer))"),
        ranks("handle = model.weight.register_hook(lambda grad: grad * 0)"),
        here("other = {'model': model, 'optimizer': optimizer}"),
        gives("train(other['model'], optimizer), other['model'] is model", (0.605, True)),
    ],
    "a layer that the notebook adds": [
        here("model = torch.nn.Sequential(net())"),
        ranks("o = sgd(model); kept = model"),
        here(
            "model.append(torch.nn.Linear(1, 1, bias=False)); torch.nn.init.ones_(model[1].weight)"
        ),
        gives("len(model), kept is model", (2, True)),
        gives("train(model, o)", 0.605),
    ],
    "a layer that the notebook replaces": [
        here("model = torch.nn.Sequential(net(), net(1))"),
        ranks("kept = model, model[0]"),
        here("model[1] = torch.nn.Identity(); optimizer = sgd(model)"),
        gives(
            "train(model, optimizer), model is kept[0], model[0] is kept[1]", (0.605, True, True)
        ),
    ],
    "one part of a model in a name of its own": [
        here(
            "class Net(torch.nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__(); self.body = net()\n"
            "    def forward(self, x): return self.body(x)\n"
            "model = Net(); optimizer = sgd(model)"
        ),
        ranks("print(train(model, optimizer))"),
        here("body = model.body; weight = body.weight; state = model.state_dict()"),
        gives("body is model.body, weight is model.body.weight", (True, True)),
        holds("state['body.weight'].data_ptr() == weight.data_ptr()"),
        gives("train(body, optimizer)", 0.004),
    ],
    "a Trainer that holds all": [
        here(
            f"{MODEL}\n"
            "class Trainer:\n"
            "    def __init__(self, model, optimizer):\n"
            "        self.model, self.optimizer, self.losses = model, optimizer, []\n"
            "    def fit(self): self.losses.append(train(self.model, self.optimizer))"
        ),
        ranks("print(model.weight.sum().item())"),
        here("trainer = Trainer(model, optimizer)"),
        ranks("trainer.fit(); trainer.fit()"),
        gives("trainer.losses, trainer.model is model", ([0.605, 0.004], True)),
        gives("train(model, optimizer)", 0.0),
    ],
    "two networks and one optimizer": [
        here(
            "a, b = net(), net(); both = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=.1)"
        ),
        ranks("print(a(torch.ones(1, 2)))"),
        gives("train(a, both), train(b, both)", (0.605, 0.605)),
    ],
    "Adam with a state": [
        here("model = net(); optimizer = torch.optim.Adam(model.parameters(), lr=1.)"),
        ranks("print(train(model, optimizer))"),
        gives("[int(each['step']) for each in optimizer.state.values()]", [5]),
        holds("[*optimizer.state][0] is model.weight"),
        here("again = optimizer"),
        gives("again is optimizer, len(again.state)", (True, 1)),
    ],
    "an optimizer that was trained in the notebook": [
        here(
            "model = net(); optimizer = sgd(model, lr=.01, momentum=.9); "
            "print(train(model, optimizer))"
        ),
        ranks("before = loss_of(model).item()"),
        gives("[*optimizer.state][0] is model.weight, len(optimizer.state)", (True, 1)),
        holds("train(model, optimizer) < before"),
    ],
    "the notebook trains one step between": [
        here(MODEL),
        ranks("kept = model.weight, optimizer"),
        here("print(train(model, optimizer, 5))"),
        gives(
            "round(loss_of(model).item(), 3), kept[0] is model.weight, kept[1] is optimizer",
            (0.605, True, True),
        ),
        gives("train(model, optimizer)", 0.004),
    ],
    "gradients": [
        here("model = net(); loss_of(model).backward()"),
        gives("model.weight.grad.tolist()", [[-20.0, -20.0]]),
        here("g = model.weight.grad"),
        holds("g is model.weight.grad"),
        ranks("model.weight.grad.zero_()"),
        gives("g.tolist()", [[0.0, 0.0]]),
    ],
    "a loader for training and one for validation": [
        here(
            "data = TensorDataset(torch.arange(10.)); a, b = random_split(data, [6, 4])\n"
            "first, second = DataLoader(a, batch_size=2), DataLoader(b, batch_size=2)"
        ),
        ranks("print(sum(len(x) for x, in first))"),
        gives("sum(len(x) for x, in second)", 4),
        holds("first.dataset.dataset is second.dataset.dataset"),
        gives("b.dataset is data, a is first.dataset", (True, True)),
    ],
    "a Dataset that caches": [
        here(
            "class Cached(Dataset):\n"
            "    def __init__(self): self.cache, self.reads = {}, 0\n"
            "    def __len__(self): return 4\n"
            "    def __getitem__(self, i):\n"
            "        if i not in self.cache:\n"
            "            self.reads += 1; self.cache[i] = torch.tensor(float(i))\n"
            "        return self.cache[i]\n"
            "data = Cached(); loader = DataLoader(data)"
        ),
        gives("[x.item() for x in loader]", [0.0, 1.0, 2.0, 3.0]),
        here("validation = DataLoader(data, batch_size=4)"),
        gives("[x.tolist() for x in validation], data.reads", ([[0.0, 1.0, 2.0, 3.0]], 4)),
        holds("validation.dataset is loader.dataset is data"),
    ],
    "a sampler and its generator": [
        here(
            "g = torch.Generator().manual_seed(1)\n"
            "sampler = torch.utils.data.RandomSampler(range(5), generator=g)"
        ),
        ranks("first = torch.randint(9, (1,), generator=g)"),
        holds("sampler.generator is g"),
        here("second = DataLoader(range(5), generator=g)"),
        holds("second.generator is g"),
    ],
    "a compiled module": [
        here(MODEL),
        ranks("compiled = torch.compile(model, backend='eager'); print(loss_of(compiled).item())"),
        gives("train(compiled, optimizer)", 0.605),
        holds("compiled._orig_mod is model"),
    ],
    "fully sharded": [
        here("m5 = torch.nn.Linear(2, 2, bias=False); torch.nn.init.zeros_(m5.weight)"),
        ranks("from torch.distributed.fsdp import fully_shard\nfully_shard(m5)"),
        ranks(
            "o5 = torch.optim.SGD(m5.parameters(), lr=.1)\n"
            "def learn():\n"
            "    for _ in range(5): o5.zero_grad(); loss_of(m5).backward(); o5.step()\n"
            "    return round(loss_of(m5).item(), 3)"
        ),
        holds("learn() < 2"),
    ],
    "a criterion, a function and a dict of all": [
        here(
            f"{MODEL}; criterion = torch.nn.MSELoss(); state = dict(model=model, epoch=0)\n"
            "def one():\n"
            "    optimizer.zero_grad()\n"
            "    loss = criterion(model(torch.ones(1, 2)), torch.full((1, 1), 10.))\n"
            "    loss.backward(); optimizer.step(); state['epoch'] += 1"
        ),
        ranks("one()"),
        here("bundle = [state, optimizer, one]"),
        ranks("bundle[2]()"),
        gives("state['epoch'], round(loss_of(bundle[0]['model']).item(), 2)", (2, 12.96)),
    ],
    "a model of a class with attributes": [
        here(
            "class Net(torch.nn.Module):\n"
            "    calls = 0\n"
            "    def __init__(self): super().__init__(); self.body = net()\n"
            "    def forward(self, x): Net.calls += 1; return self.body(x)\n"
            "model = Net(); optimizer = sgd(model)"
        ),
        gives("train(model, optimizer), Net.calls", (0.605, 6)),
        here("second = Net()"),
        gives(
            "round(loss_of(second).item()), Net.calls, type(second) is type(model)", (100, 7, True)
        ),
        gives("train(model, optimizer)", 0.004),
    ],
    "the same model under two names": [
        here(f"{MODEL}"),
        ranks("print(train(model, optimizer))"),
        here("net2 = model"),
        gives("net2 is model, train(net2, optimizer)", (True, 0.004)),
    ],
    "a model of transformers": [
        here(
            "from transformers import BertConfig, BertModel\n"
            "bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9,\n"
            "    num_attention_heads=1, intermediate_size=8))"
        ),
        ranks("bert.eval(); before = bert.embeddings.word_embeddings.weight"),
        here("embedding = bert.get_input_embeddings(); o = sgd(bert)"),
        holds("embedding.weight is before"),
        holds("any(p is before for p in o.param_groups[0]['params'])"),
    ],
}

NOTEBOOK_STARTS_OVER: dict[str, list[Step]] = {
    "the notebook makes a new model": [
        here(MODEL),
        ranks("print(train(model, optimizer))"),
        here(MODEL),
        hinting(gives("train(model, optimizer)", 0.605), r"`model`"),
        gives("train(model, optimizer)", 0.004),
    ],
    "a new model, while the ranks' wrapper has the old one": [
        here(MODEL),
        ranks(f"{DDP}\nprint(train(ddp, optimizer))"),
        here("model = net()"),
        hinting(ranks("model"), r"`model`.*`ddp`"),
        gives("ddp.module is model, train(model, sgd(model))", (False, 0.605)),
    ],
    "a string in the place of a model": [
        here(MODEL),
        ranks("print(train(model, optimizer))"),
        here("model = 'x'"),
        hinting(gives("model", "x"), r"`model`.*Linear"),
        holds("optimizer.param_groups[0]['params'][0].sum().item() > 9"),
    ],
    "a model in the place of the ranks' wrapper of the same name": [
        here("model = net()"),
        ranks(f"{DDP}\nmodel = ddp"),
        here("model = net()"),
        hinting(gives("type(model).__name__", "Linear"), r"`model`.*DistributedDataParallel"),
    ],
    "the ranks' own name stays until the notebook assigns it": [
        here("model = net()"),
        ranks(f"{DDP}\nmodel = ddp"),
        here("other = model"),
        gives("type(model).__name__, model.module is other", ("DistributedDataParallel", True)),
    ],
}


WITH_WRAPPERS = {
    name: steps
    for name, steps in CASES.items()
    if any(re.search("DDP|torch.distributed", step.source) for step in steps)
}
"""Programs that need a process group."""


@table({**CASES, **NOTEBOOK_STARTS_OVER})
def test_training_is_as_in_a_plain_kernel(program: Run, name: str) -> None:
    """The ranks have the values and the links that one plain kernel would have."""
    program({**CASES, **NOTEBOOK_STARTS_OVER}[name])


@pytest.mark.unit
@table({name: steps for name, steps in CASES.items() if name not in WITH_WRAPPERS})
def test_values_are_those_of_a_plain_kernel(name: str) -> None:
    """A program gives equal values if one process runs it, without a notebook."""
    assert is_plain(CASES[name])
    run_in_one_process(CASES[name])


@table(WITH_WRAPPERS)
def test_values_are_the_same_on_ranks_alone(program: Run, name: str) -> None:
    """A program that needs a process group gives equal values if every cell runs on the ranks."""
    assert is_plain(CASES[name])
    program(on_ranks(CASES[name]))
