"""Tests of `nbdist.values.tensors`: contents out of band, and properties that tensors keep."""

from __future__ import annotations

import copyreg
import importlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from nbdist.values.pickling import Pickled, pickle, unpickle
from tests.waiting import SOON

torch = pytest.importorskip("torch")


def _frames(value: Any) -> list[bytearray]:
    return [bytearray(memoryview(frame)) for frame in pickle(value, {}).frames]


def _there_and_back(value: Any) -> Any:
    return unpickle(_frames(value))


def _size(pickled: Pickled) -> int:
    return sum(memoryview(frame).nbytes for frame in pickled.frames)


def test_tensors_come_back_as_they_were() -> None:
    """Tensors keep contents, type and shape, and come back as leaves without a gradient."""
    for tensor in (
        torch.randn(3, 4),
        torch.randn(5).bfloat16(),
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.empty(0, 3),
        torch.arange(1000.0)[10:20],
        torch.arange(1000.0)[7],
    ):
        back = _there_and_back(tensor)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))
        assert back.requires_grad is False
        assert back.is_leaf


class Sub(torch.Tensor):
    """A user's subclass of Tensor."""


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:Sparse CSR", "ignore:TypedStorage")
def test_tensors_without_plain_memory_come_back_as_they_were() -> None:
    """Sparse, quantized and meta tensors, and those of subclasses, come back as they were."""
    eye, ones = torch.eye(3), torch.ones(3)
    for sparse in (eye.to_sparse().coalesce(), eye.to_sparse_csr()):
        assert torch.equal(_there_and_back(sparse).to_dense(), eye)
    quantized = torch.quantize_per_tensor(ones, 0.5, 1, torch.qint8)
    assert torch.equal(_there_and_back(quantized).dequantize(), ones)
    assert _there_and_back(torch.empty(3, device="meta")).shape == (3,)
    back = _there_and_back(ones.as_subclass(Sub))
    assert type(back) is Sub
    assert torch.equal(back, ones)


def test_parameters_keep_gradients_and_attributes() -> None:
    """Tensors keep their class, `requires_grad`, `.grad` of any layout, and added attributes."""
    weight = torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    weight.is_embedding = True
    leaf = torch.ones(2, requires_grad=True)
    back = _there_and_back([weight, frozen, leaf])
    assert [type(t) for t in back] == [torch.nn.Parameter] * 2 + [torch.Tensor]
    assert [t.requires_grad for t in back] == [True, False, True]
    assert back[0].is_embedding is True
    (back[0] * back[2].sum()).sum().backward()
    assert back[0].grad is not None
    retains = weight * 2
    retains.retain_grad()
    table = torch.nn.Embedding(4, 2, sparse=True)
    own = torch.ones(3).as_subclass(Sub).requires_grad_()
    (retains.sum() + table(torch.tensor([1])).sum() + own.sum() * 3).backward()
    was = [weight, retains, table.weight, own]
    back = _there_and_back(was)
    for one, other in zip(was, back, strict=True):
        assert one.grad.layout is other.grad.layout
        assert torch.equal(one.grad.to_dense(), other.grad.to_dense())
    assert type(back[3]) is Sub
    if hasattr(torch.Tensor, "grad_dtype"):  # from torch 2.10 on
        half = torch.nn.Parameter(torch.ones(3))
        half.grad_dtype = torch.bfloat16
        half.grad = torch.ones(3, dtype=torch.bfloat16)
        assert _there_and_back(half).grad.dtype is torch.bfloat16


def test_gradients_in_one_bucket_stay_one_memory() -> None:
    """Gradients that are views of a bucket, as with DDP, share memory that is sent once."""
    bucket = torch.zeros(10_000)
    weights = [torch.nn.Parameter(torch.ones(5_000)) for _ in range(2)]
    for weight, view in zip(weights, bucket.split(5_000), strict=True):
        weight.grad = view
    assert 80_000 < _size(pickle([weights, bucket], {})) < 82_000
    back, its_bucket = _there_and_back((weights, bucket))
    its_bucket.fill_(3)
    assert [weight.grad.sum() for weight in back] == [15_000, 15_000]


def test_contents_are_not_copied() -> None:
    """A frame is the memory of the sender's tensor, and then of the receiver's tensor."""
    tensor = torch.zeros(10_000)
    pickled = pickle(tensor, {})
    assert memoryview(pickled.frames[0]).nbytes < 500
    tensor[0] = 1
    frame = bytearray(memoryview(pickled.frames[1]))
    back = unpickle([pickled.frames[0], frame])
    assert back[0] == 1
    frame[4:8] = frame[0:4]
    assert back[1] == 1
    # The frames keep the contents of a tensor that has ended.
    pickled = pickle(torch.full((100_000,), 7.0), {})
    torch.zeros(100_000)
    assert unpickle([bytearray(memoryview(f)) for f in pickled.frames]).eq(7).all()
    # Frames from a message are bytes: the tensor is a copy, without a warning.
    back = unpickle([bytes(frame) for frame in _frames(torch.zeros(3))])
    back += 1
    assert back.sum() == 3


def test_shared_tensors_stay_shared() -> None:
    """Tied weights are sent once; a write through a view shows in another view of its memory."""
    weight = torch.nn.Parameter(torch.ones(1000))
    frames = _frames({"a": weight, "b": [weight]})
    back = unpickle(frames)
    assert back["a"] is back["b"][0]
    assert len(frames) == 2
    x = torch.zeros(1000)
    table = x.view(10, 100)
    for views in (
        [x, x[2:5]],
        [x[0:20], x[10:30]],
        [table, table.t()],
        [table[:, 0], table[0]],
        [table[:, 3], table[:, 3]],
        [table[:, 3], x.view(20, 50)[:19, 3]],
    ):
        x.zero_()
        for tensors in (_there_and_back(views), views):
            tensors[0].fill_(1)
            assert tensors[1].sum() > 0


def test_empty_tensors_do_not_become_one_memory() -> None:
    """An empty tensor's memory can grow; only tensors that shared this memory grow with it."""

    def memory(value: Any) -> Any:
        return value if isinstance(value, torch.UntypedStorage) else value.untyped_storage()

    for two in (
        [torch.empty(0), torch.empty(0)],
        [torch.zeros(1).expand(0, 4), torch.zeros(1).expand(0, 4)],
        [torch.empty(0, dtype=torch.complex64).conj() for _ in range(2)],
        [torch.zeros(10)[:0], torch.zeros(10)[:0]],
        [torch.UntypedStorage(0) for _ in range(2)],
    ):
        one, other = map(memory, _there_and_back(two))
        one.resize_(12)
        assert other.nbytes() == 0
    tensor = torch.empty(0)
    same, view = _there_and_back((tensor, tensor.detach()))
    torch.ones(3, out=same)
    assert view.untyped_storage().nbytes() == 12


def test_a_small_part_of_a_big_tensor_goes_alone() -> None:
    """A view of over half of a tensor takes the whole memory along, unless `exact` is set."""
    part = torch.zeros(1000)[:600]
    assert unpickle(pickle(part, {}).frames).untyped_storage().nbytes() == 4000
    assert unpickle(pickle(part, {}, exact=True).frames).untyped_storage().nbytes() == 2400
    data = torch.zeros(1_000_000)
    assert _size(pickle(data[:32], {})) < 1000
    assert _size(pickle([data[:32], data[100:132]], {})) < 2000
    assert _size(pickle(data.view(1000, 1000)[:, 3], {})) < 5000


def test_strides_are_kept() -> None:
    """A small part of a big tensor keeps its strides, and is sent without the rest."""
    x = torch.arange(1e6).reshape(1000, 1000)
    last = {"memory_format": torch.channels_last}
    for shown in (
        x[10:20].T,
        x[5:6].expand(4, 1000),
        x[5].expand(3, 4, 1000),  # `expand` adds a dimension
        x[:2].reshape(2, 10, 10, 10).to(**last),
        x[:20].reshape(20, 10, 10, 10).to(**last)[3:5],
        x[3].reshape(10, 10, 10).permute(2, 0, 1),
    ):
        (back,) = _there_and_back([shown])
        assert back.stride() == shown.stride()
        assert torch.equal(back, shown)
        assert _size(pickle([shown], {})) < 100_000


def test_few_elements_far_apart_are_sent_alone() -> None:
    """The elements are sent in the order of memory; an expanded element is sent once."""
    big = torch.arange(1e6).reshape(1000, 1000)
    shown = [big[:, 3:5].T, big[:, 3:4].expand(1000, 10**6)]
    back = [_there_and_back([view])[0] for view in shown]
    assert [view.stride() for view in back] == [(1, 2), (1, 0)]
    assert torch.equal(back[0], shown[0])
    assert torch.equal(back[1][:, -1], big[:, 3])
    assert all(_size(pickle([view], {})) < 10_000 for view in shown)


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_torchs_constants_come_back_as_themselves() -> None:
    """Constants and operators stay the same objects; limits, devices and storages stay equal."""
    attention = importlib.import_module("torch.nn.attention")
    formats = [torch.channels_last, torch.channels_last_3d, torch.contiguous_format]
    kinds = [torch.preserve_format, torch.strided, torch.sparse_csr, torch.per_tensor_affine]
    limits = [torch.finfo(torch.bfloat16), torch.iinfo(torch.int8), np.finfo("f4"), np.iinfo("i2")]
    operators = [torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.relu]
    one_of = [*formats, *kinds, *operators, attention.SDPBackend, torch.float16]
    backs = _there_and_back(one_of)
    assert all(one is other for one, other in zip(one_of, backs, strict=True))
    assert list(map(repr, _there_and_back(limits))) == list(map(repr, limits))
    values = [attention.SDPBackend.MATH, torch.device("cpu"), torch.Size([2])]
    assert _there_and_back(values) == values
    generator = torch.Generator().manual_seed(3)
    back = _there_and_back(generator)
    assert torch.equal(torch.rand(3, generator=back), torch.rand(3, generator=generator))
    storage = torch.arange(3, dtype=torch.uint8).untyped_storage()
    assert bytes(_there_and_back(storage).tolist()) == b"\0\1\2"
    assert torch.Tensor not in copyreg.dispatch_table


@pytest.mark.world
def test_the_receiver_imports_torch_when_a_tensor_comes() -> None:
    """A process imports torch when it unpickles a tensor, and not before."""
    frames = [bytes(frame) for frame in _frames({"x": torch.ones(3)})]
    source = (
        "import sys\nfrom nbdist.values.pickling import unpickle\n"
        "assert 'torch' not in sys.modules\n"
        f"print(unpickle({frames!r})['x'].sum().item())"
    )
    shown = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=SOON, check=True
    )
    assert shown.stdout == "3.0\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_arrive_on_the_cpu() -> None:
    """Tensors on a GPU arrive on the CPU with their contents, and share memory as before.

    A sketch of a tensor on a GPU has the tensor's version, which changes with the contents.
    """
    weight = torch.nn.Parameter(torch.arange(10.0, device="cuda"))
    back = _there_and_back({"w": weight, "part": weight.detach()[2:4]})
    assert back["w"].device.type == "cpu"
    assert torch.equal(back["w"], weight.cpu())
    back["part"].fill_(-1)
    assert back["w"][2] == -1
    sketch = pickle(weight, {}, sketch=True)
    assert sketch.is_sketch
    assert not pickle(torch.ones(3), {}, sketch=True).is_sketch
    with torch.no_grad():
        weight += 1
    assert pickle(weight, {}, sketch=True).versions != sketch.versions
