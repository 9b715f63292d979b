"""jupyter_client's way to a worker process, so that the kernel manager stays jupyter_client's."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase

from nbdist.node.processes import WorkerProcess


class WorkerSpec(KernelSpecManager):
    """Has the one kernel spec of a worker, which nobody installs, whatever is asked for."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Called by the kernel manager; the spec names the provisioner below."""
        provisioner = {"provisioner_name": "nbdist-worker"}
        metadata = {"kernel_provisioner": provisioner}
        return KernelSpec(argv=[], display_name="nbdist worker", metadata=metadata)


class WorkerProvisioner(KernelProvisionerBase):
    """Named by the kernel spec of a worker; `AsyncKernelManager.start_kernel` makes one.

    The agent passes `source`, `orders`, `stdout` and `stderr` to `start_kernel`.
    """

    process: WorkerProcess | None = None

    @property
    def has_process(self) -> bool:
        """Whether a process was started and not yet waited for."""
        return self.process is not None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Called by the kernel manager first: write the connection file."""
        manager = self.parent
        assert manager is not None
        manager.write_connection_file()
        self.connection_info = manager.get_connection_info()
        return await super().pre_launch(cmd=[], **kwargs)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Called by the kernel manager next: have the source start the worker."""
        self.process = await kwargs["source"].start(
            kwargs["orders"], kwargs["stdout"], kwargs["stderr"]
        )
        return self.connection_info

    async def poll(self) -> int | None:
        """None while it runs, else its exit code."""
        if self.process is None or not self.process.exited.done():
            return None
        return self.process.exited.result()

    async def wait(self) -> int | None:
        """Its exit code, as soon as it has one."""
        if self.process is None:
            return 0
        code = await asyncio.shield(self.process.exited)
        self.process = None
        return code

    async def send_signal(self, signum: int) -> None:
        """Signal the worker and what it started."""
        if self.process is not None:
            self.process.send_signal(signum)

    async def kill(self, restart: bool = False) -> None:  # noqa: FBT001, FBT002
        """End it at once."""
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:  # noqa: FBT001, FBT002
        """Ask it to end."""
        await self.send_signal(signal.SIGTERM)

    async def cleanup(self, restart: bool = False) -> None:  # noqa: FBT001, FBT002
        """Nothing of ours is left once the process has ended."""
