"""Step time, bytes and loss of PowerSGD between two machines of two ranks each, with a slow link between them.

    python -m tests.benchmarks.powersgd_on_slow_links

Compares FSDP2 with uncompressed gradients (its own hybrid sharding) with this package's compression at the same
sharding, and, without sharding, this package's compression with torch's `powerSGD_hook` under DDP at equal rank, also
with the hook's warm start after two uncompressed steps. Their steps alternate within the same processes, so that ratios
of times hold on a busy machine. Needs root, for network namespaces.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from lightning_dalle.distributed.hsdp import shard_blocks
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.gradients import PowerSGDGradients
from tests.benchmarks.limited_link import ADDRESSES, bytes_that_left, limit, start, two_machines, why_not

RANKS = 4
WIDTH, DEPTH, BATCH = 256, 6, 32
RANK = 2
# Megabits per second and timed steps of each contestant.
PHASES: list[tuple[int | None, int]] = [(None, 30), (100, 12), (20, 6)]


class Block(nn.Module):
    """A residual block, 4 times as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.fc2(self.fc1(self.norm(hidden)).relu())


class Network(nn.Module):
    """3.2 million parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Contestant:
    """One way to average gradients."""

    def __init__(self) -> None:
        self.network: nn.Module = Network(seed=0)
        self.losses: list[float] = []
        self.wrap()
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-3)
        self.prepare()

    def wrap(self) -> None:
        """Distribute the network."""

    def prepare(self) -> None:
        """Prepare what needs the optimizer."""

    def before_backward(self) -> None:
        """Prepare the gradients."""

    def after_backward(self) -> None:
        """Exchange the gradients."""

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        loss = mse_loss(self.network(inputs), targets)
        self.optimizer.zero_grad()
        self.before_backward()
        loss.backward()
        self.after_backward()
        self.optimizer.step()
        mean = loss.detach()
        distributed.all_reduce(mean)
        self.losses.append(mean.item() / RANKS)


class Nothing(Contestant):
    """Sends what measuring itself sends."""

    def wrap(self) -> None:
        self.network = nn.Linear(1, 1)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        distributed.all_reduce(torch.zeros(()))


class Uncompressed(Contestant):
    """FSDP2's hybrid sharding."""

    def wrap(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for block in self.network.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.network, mesh=mesh)


class Compressed(Contestant):
    """FSDP2 inside a machine, PowerSGD of this package between them."""

    mesh: DeviceMesh
    mesh_shape = (2, 2)

    def __init__(self, **settings: Any) -> None:
        self.config = PowerSGDConfig(matrix_approximation_rank=RANK, **settings)
        super().__init__()

    def wrap(self) -> None:
        self.mesh = init_device_mesh("cpu", self.mesh_shape, mesh_dim_names=("replicate", "shard"))
        if self.mesh["shard"].size() > 1:
            shard_blocks(self.network, self.mesh["shard"])

    def prepare(self) -> None:
        self.gradients = PowerSGDGradients(
            dict(self.network.named_parameters()),
            self.mesh["replicate"].get_group(),
            self.mesh["shard"].get_group(),
            self.config,
        )

    def before_backward(self) -> None:
        self.gradients.begin_backward()
        self.gradients.begin_last_backward()

    def after_backward(self) -> None:
        self.gradients.synchronize(dict(self.network.named_parameters()))


class Unsharded(Compressed):
    """PowerSGD of this package between all ranks, which hold all parameters."""

    mesh_shape = (4, 1)


class Hook(Contestant):
    """DDP with torch's hook, from the first step on."""

    def wrap(self) -> None:
        # One bucket: the collectives of several meet each other in another order on each rank.
        self.network = DistributedDataParallel(self.network, bucket_cap_mb=1024)
        # Without a warm start its buckets clear each other's P and Q, and it fails now and then.
        state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        self.network.register_comm_hook(state, powerSGD_hook)


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    with torch.no_grad():
        return inputs, _teacher()(inputs)


def _teacher() -> nn.Module:
    if not _TEACHERS:
        _TEACHERS.append(Network(seed=1))
    return _TEACHERS[0]


_TEACHERS: list[nn.Module] = []


def _timed_steps(contestants: dict[str, Contestant], machine: int, start_step: int, steps: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in contestants}
    sent = dict.fromkeys(contestants, 0)
    for step in range(start_step, start_step + steps):
        batch = _batch(step, distributed.get_rank())
        for name, contestant in contestants.items():
            distributed.barrier()
            bytes_before, before = bytes_that_left(machine), time.perf_counter()
            contestant.step(*batch)
            distributed.barrier()
            times[name].append(time.perf_counter() - before)
            sent[name] += bytes_that_left(machine) - bytes_before
    return {
        name: {"seconds": statistics.median(times[name]), "kernel_bytes": sent[name] / steps} for name in contestants
    }


def _work(rank: int) -> None:
    """Run one rank, inside its machine."""
    torch.set_num_threads(1)
    machine = rank // 2
    distributed.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:29577", rank=rank, world_size=RANKS)
    contestants: dict[str, Contestant] = {
        "nothing": Nothing(),
        "uncompressed": Uncompressed(),
        "compressed": Compressed(),
        "compressed, overlap": Compressed(overlap=True),
        "unsharded": Unsharded(),
        "unsharded, overlap": Unsharded(overlap=True),
        "unsharded, as hook": Unsharded(warm_start=True, start_powersgd_iter=2),
        "hook": Hook(),
    }
    _timed_steps(contestants, machine, 0, 5)
    compressed = contestants["compressed"]
    assert isinstance(compressed, Compressed)
    step = 5
    for megabits, steps in PHASES:
        if rank % 2 == 0:
            limit(machine, megabits)
        communication = compressed.gradients.compressor.communication
        accounted = torch.tensor([float(communication.bytes_sent)])
        answer = _timed_steps(contestants, machine, step, steps)
        step += steps
        accounted = (torch.tensor([float(communication.bytes_sent)]) - accounted) / steps
        # Both ranks of this machine.
        distributed.all_reduce(accounted, group=compressed.mesh["shard"].get_group())
        answer["compressed"]["accounted_bytes"] = accounted.item()
        idle_bytes = answer.pop("nothing")["kernel_bytes"]
        for name, measured in answer.items():
            measured["loss"] = statistics.mean(contestants[name].losses[-5:])
            measured["kernel_bytes"] -= idle_bytes
        if rank == 0:
            print(json.dumps({"megabits": megabits, **answer}), flush=True)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Start the ranks and print what the first one measured."""
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    with two_machines():
        arguments = ["-m", "tests.benchmarks.powersgd_on_slow_links"]
        ranks = [start(rank // 2, [*arguments, str(rank)], {"OMP_NUM_THREADS": "1"}) for rank in range(RANKS)]
        try:
            output, _ = ranks[0].communicate(timeout=900)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    print("   Mbit/s          contestant  ms a step   speed-up  kB a step (kernel)  kB (accounted)      loss")
    for line in output.splitlines():
        phase = json.loads(line)
        for name, found in phase.items():
            if name == "megabits":
                continue
            ratio = phase["uncompressed"]["seconds"] / found["seconds"]
            accounted = f"{found['accounted_bytes'] / 1e3:.1f}" if "accounted_bytes" in found else "-"
            print(
                f"{phase['megabits'] or 'unlimited':>9}  {name:>18}  {1e3 * found['seconds']:9.0f}  {ratio:10.2f}  "
                f"{found['kernel_bytes'] / 1e3:18.1f}  {accounted:>14}  {found['loss']:8.4f}"
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _work(int(sys.argv[1]))
    else:
        main()
