"""Writes sharded tensors, their meshes and FSDP2 modules to a snapshot, and restores them.

The usual pickles of these objects would contain process groups, which cannot be pickled. So the
pickle of a rank's variables has a `Mesh` in place of each mesh, and a number in place of each
DTensor. The rank's shards of the DTensors are in a second pickle, which other ranks may read, too.
An FSDP2 module is written as it was before `fully_shard`, with the arguments of that call. The ops
in `snapshot.py` use this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pickle import PicklingError
from typing import Any, cast

import torch

from nbdist.values.tensors import set_attributes
from nbdist.wire.ops import Mesh
from nbdist.worker.compat import models as seam
from nbdist.worker.namespace import Context
from nbdist.worker.returned import as_before_fsdp, dist_class

USE_CHECKPOINT = "use torch.distributed.checkpoint"


@dataclass(frozen=True)
class Shard:
    """A rank's shard of a DTensor, as it is written to a snapshot.

    `local` is the shard, and `shape` and `stride` are those of the whole DTensor. `of` is the mesh
    of the DTensor. If the DTensor is only on some dimensions of this mesh, `dims` has their names.
    """

    of: Mesh
    dims: tuple[str, ...] | None
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    local: torch.Tensor = field(compare=False)


@dataclass
class Sharding:
    """The arguments of a call of `fully_shard`, for one module or for several together."""

    mesh: Any
    options: dict[str, Any]
    settings: dict[str, Any]  # flags and numbers, such as whether gradients are reduced


# --- write ------------------------------------------------------------------------------


@dataclass
class Writer:
    """Tells pickle how to write DTensors, meshes and FSDP2 modules to a snapshot.

    The shards and meshes of these objects are collected in `shards` and `meshes`.
    """

    shards: list[Shard] = field(default_factory=list)
    meshes: set[Mesh] = field(default_factory=set)
    # By id, each DTensor and its number. The DTensor is kept alive, so that no other object gets
    # its id.
    _numbers: dict[int, tuple[Any, int]] = field(default_factory=dict)
    _shardings: dict[int, Sharding] = field(default_factory=dict)

    def reduce(self, value: Any) -> tuple[Any, ...]:
        """Return how to pickle a DTensor, a mesh or an FSDP2 module, as `__reduce__` does.

        Return NotImplemented for any other object.
        """
        kind = type(value)
        if kind is dist_class("tensor", "DTensor"):
            return self._reduce_tensor(value)
        if kind is dist_class("device_mesh", "DeviceMesh"):
            return find_mesh, self._mesh_and_dims(value)
        if isinstance(value, torch.nn.Module) and seam.is_of_fsdp(value):
            return self._reduce_module(value)
        return cast("tuple[Any, ...]", NotImplemented)

    def _reduce_tensor(self, tensor: Any) -> tuple[Any, ...]:
        # A tensor can come a second time: `pickle` starts again if tensors overlap in memory.
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = tensor, len(self.shards)
            of, dims = self._mesh_and_dims(tensor.device_mesh)
            with torch.no_grad():
                local = tensor.detach().to_local()
            shape = tuple(tensor.shape), tuple(tensor.stride())
            self.shards.append(Shard(of, dims, tuple(tensor.placements), *shape, local))
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        args = (self._numbers[id(tensor)][1], tensor.requires_grad, is_parameter)
        return find_tensor, args, tensor.__dict__, None, None, set_attributes

    def _mesh_and_dims(self, mesh: Any) -> tuple[Mesh, tuple[str, ...] | None]:
        root = seam.root_of(mesh)
        ranks, names = root.mesh, root.mesh_dim_names
        of = Mesh(root.device_type, tuple(ranks.shape), tuple(ranks.flatten().tolist()), names)
        self.meshes.add(of)
        if mesh is root:
            return of, None
        if not set(mesh.mesh_dim_names) <= set(names):
            raise PicklingError(f"it is on a mesh that was flattened; {USE_CHECKPOINT}")
        return of, tuple(mesh.mesh_dim_names)

    def _reduce_module(self, module: Any) -> tuple[Any, ...]:
        if why := seam.sharding_problem(module):
            raise PicklingError(f"{why}; {USE_CHECKPOINT}")
        kind, state = as_before_fsdp(module)
        if state is None:
            raise PicklingError(f"{kind.__name__} has a pickling of its own; {USE_CHECKPOINT}")
        sharding = None
        if isinstance(module, dist_class("fsdp", "FSDPModule")):
            call, *arguments = seam.sharding_of(module)
            sharding = self._shardings.setdefault(call, Sharding(*arguments))
        return object.__new__, (kind,), (state, sharding), None, None, fill_module


# --- restore ----------------------------------------------------------------------------

# For the snapshot that is being restored: the new meshes by the meshes in the snapshot, the
# DTensors by number, and the modules to shard.
_meshes: dict[Mesh, Any] = {}
_tensors: list[Any] = []
Unsharded = tuple[Sharding, list[Any]]  # arguments of `fully_shard`, and the modules to shard
_unsharded: dict[int, Unsharded] = {}


def meshes(_: Context, instead: Mapping[Mesh, Mesh]) -> None:
    """Make the device meshes that values in a snapshot need; all ranks must call this together.

    `instead` has, for each mesh in the snapshot, the layout of the mesh to make in its place. This
    is an op of `%dist_restore`, which is called before `load`.
    """
    from torch.distributed.device_mesh import DeviceMesh

    forget()
    for mesh, now in instead.items():
        ranks = torch.tensor(now.ranks, dtype=torch.int, device="cpu").view(now.shape)
        _meshes[mesh] = DeviceMesh(now.device, ranks, mesh_dim_names=now.names)


@contextmanager
def restoring(tensors: Sequence[Any]) -> Iterator[Mapping[int, Unsharded]]:
    """Within this context, values of a snapshot can be unpickled.

    `tensors` has the DTensors of the snapshot; the pickle has only their indices. Yields a table,
    in which unpickling lists the modules that `shard_modules` must shard afterwards.
    """
    _tensors[:] = tensors
    _unsharded.clear()
    try:
        yield _unsharded
    finally:
        _tensors.clear()


def find_mesh(of: Mesh, dims: tuple[str, ...] | None) -> Any:
    """Return the new mesh for the snapshot's mesh `of`, or its part with the dimensions `dims`."""
    mesh = _meshes[of]
    return mesh if dims is None else mesh[dims]


def find_tensor(number: int, requires_grad: bool, is_parameter: bool) -> Any:  # noqa: FBT001
    """Return the DTensor that `restoring` has under this number, if `is_parameter` as a Parameter.

    Unpickling calls this function.
    """
    if is_parameter:
        return torch.nn.Parameter(_tensors[number], requires_grad)
    return _tensors[number].requires_grad_(requires_grad)


def fill_module(module: Any, state: tuple[dict[str, Any], Sharding | None]) -> None:
    """Set an unpickled module's state; if the module was sharded, list it for `shard_modules`."""
    module.__setstate__(state[0])
    if (sharding := state[1]) is not None:
        # Move the entry to the end of the table. Inner modules are unpickled before outer modules,
        # and must be sharded before them.
        _, together = _unsharded.pop(id(sharding), (sharding, []))
        _unsharded[id(sharding)] = sharding, [*together, module]


def own_tensors(shards: Sequence[Shard]) -> list[Any]:
    """Make the snapshot's DTensors from the shards in this rank's own file; needs no collective."""
    tensors = []
    for shard in shards:
        mesh = find_mesh(shard.of, shard.dims)
        shape = {"shape": torch.Size(shard.shape), "stride": shard.stride}
        with torch.no_grad():
            from_local = dist_class("tensor", "DTensor").from_local
            tensors.append(from_local(shard.local, mesh, shard.placements, **shape))
    return tensors


def shard_modules(unsharded: Sequence[Unsharded]) -> None:
    """Call `fully_shard` again on unpickled modules; all ranks must call this together."""
    for sharding, modules in unsharded:
        _shard(sharding, modules)


def forget() -> None:
    """Clear the tables of new meshes and modules, which would keep restored values alive."""
    _meshes.clear()
    _unsharded.clear()


def _shard(sharding: Sharding, modules: Sequence[Any]) -> None:
    """Call `fully_shard` on modules, such that they keep the parameters that were restored.

    `fully_shard` would replace these parameters, to which the optimizer refers. So the modules get
    empty parameters before the call, and their own parameters again afterwards. FSDP2 uses them
    from its next forward on, as it does after `load_state_dict(assign=True)`.
    """
    from torch.distributed.fsdp import fully_shard

    places = [place for module in modules for place in _parameters(module)]
    sharded = [place for place in places if type(place[2]) is dist_class("tensor", "DTensor")]
    empty = {}
    for _, _, p in sharded:
        meta = torch.empty(p.shape, dtype=p.dtype, device="meta")
        empty[id(p)] = torch.nn.Parameter(meta, p.requires_grad)
    placements = {empty[id(p)]: next(filter(_is_shard, p.placements)) for _, _, p in sharded}
    for module, name, parameter in sharded:
        setattr(module, name, empty[id(parameter)])
    fully_shard(
        modules[0] if len(modules) == 1 else [*modules],
        mesh=sharding.mesh,
        shard_placement_fn=placements.get,
        ignored_params={p for _, _, p in places if id(p) not in empty},
        **sharding.options,
    )
    for module, name, parameter in sharded:
        setattr(module, name, parameter)
    seam.set_on_fsdp(modules[0], sharding.settings)


def _parameters(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (module, name, parameter) for each parameter of a module and of its inner modules.

    Inner modules that were sharded by another call of `fully_shard` are left out.
    """
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield module, name, parameter
    for inner in module.children():
        if not isinstance(inner, dist_class("fsdp", "FSDPModule")):
            yield from _parameters(inner)


def is_sharded(value: Any) -> bool:
    """Return True if a value is sharded, so that a rank has only a part of it.

    This is said of a DTensor that is split over several ranks, of a module or optimizer with such
    parameters, and of any module that contains an FSDP1 module.
    """
    if isinstance(value, torch.nn.Module):
        fsdp1 = dist_class("fsdp", "FullyShardedDataParallel")
        is_fsdp1 = any(isinstance(each, fsdp1) for each in value.modules())
        return is_fsdp1 or any(map(is_sharded, value.parameters()))
    if isinstance(value, torch.optim.Optimizer):
        return any(is_sharded(each) for group in value.param_groups for each in group["params"])
    if not isinstance(value, dist_class("tensor", "DTensor")):
        return False
    parts = enumerate(value.placements)
    return any(_is_shard(each) and value.device_mesh.size(dim) > 1 for dim, each in parts)


def _is_shard(placement: Any) -> bool:
    return type(placement) is dist_class("tensor", "Shard")


# --- restore on other ranks -------------------------------------------------------------


def assembled_tensors(files: Mapping[int, Sequence[Shard]], source: int) -> list[Any]:
    """Join the shards in all files of a snapshot, and shard the whole tensors over this world.

    `files` has, by the rank that wrote the file, the shards in the file. Return a DTensor for each
    shard in the file of the rank `source`, in the order of that file. Raises ValueError if the
    shards cannot be joined.
    """
    from torch.distributed.tensor import distribute_tensor

    tensors = []
    for number, shard in enumerate(files[source]):
        pieces = [files[rank][number : number + 1] for rank in shard.of.ranks]
        if any(each != [shard] or each[0].local.dtype != shard.local.dtype for each in pieces):
            raise ValueError("the ranks' sharded tensors are not the same ones")
        if shard.dims is not None:
            raise ValueError("a sharded tensor is on a part of a mesh")
        whole = _assembled([each[0].local for each in pieces], shard)
        mesh = find_mesh(shard.of, shard.dims)
        tensor = distribute_tensor(whole, mesh, shard.placements, src_data_rank=None)
        tensors.append(tensor.detach().clone())  # copy the part, so that `whole` can be freed
    return tensors


def _assembled(pieces: Sequence[torch.Tensor], shard: Shard) -> torch.Tensor:
    """Return the whole tensor, joined from the ranks' pieces.

    The pieces are in the order of the mesh's ranks. In this order neighbours differ in the last
    dimension of the mesh, so this dimension is joined first.
    """
    for size, placement in reversed([*zip(shard.of.shape, shard.placements, strict=True)]):
        rows = [pieces[start : start + size] for start in range(0, len(pieces), size)]
        if _is_shard(placement):
            pieces = [torch.cat([*row], placement.dim) for row in rows]
        elif placement.is_replicate():
            pieces = [row[0] for row in rows]
        else:
            raise ValueError(f"a tensor is {placement} on a mesh")
    return pieces[0]
