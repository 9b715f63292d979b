"""The environment variables that torchrun gives its workers."""

from __future__ import annotations

from collections.abc import Mapping

from nbdist.wire.messages import WorldSpec


def torchrun_variables(spec: WorldSpec, rank: int, port: int) -> Mapping[str, str]:
    """The rank's part of the environment, on one machine.

    `port` is one that nobody listens on yet; torchrun's agent has a store there, here rank
    0 of whoever wants one makes it (TORCHELASTIC_USE_AGENT_STORE).
    Names and meanings are torch.distributed.elastic's (agent/server/local_elastic_agent.py);
    libraries such as Accelerate and Lightning read them.
    """
    size = str(spec.world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": spec.pool,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": spec.name,
        "OMP_NUM_THREADS": str(spec.threads),
        "NBDIST_WORLD": spec.name,
        **({"CUDA_VISIBLE_DEVICES": ",".join(spec.gpus)} if spec.gpus else {}),
        # gloo would ask the host's name for an address and listen on that one.
        "GLOO_SOCKET_IFNAME": spec.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # torchrun's 1, as torch's 3, ends a worker ten minutes into a wait, also for somebody who
        # sits in a debugger.  Who waits in vain is found and freed by nbdist.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": spec.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        "TORCH_NCCL_ENABLE_MONITORING": spec.environ.get("TORCH_NCCL_ENABLE_MONITORING", "0"),
        "MPLBACKEND": spec.environ.get("MPLBACKEND", "module://matplotlib_inline.backend_inline"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
