from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightning_dalle.distributed.context_parallel.plan import ContextParallelConfig
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.strategies.mesh import MeshStrategy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard_size": 0}, r"shard_size \(0\) must be at least 1"),
        ({"powersgd": PowerSGDConfig()}, "shard_size is None; give shard_size=1"),
        ({"shard_size": 2, "exclude": ["head.*"]}, r"exclude \(head.\*\) has no effect without powersgd"),
        ({"start_method": "thread"}, r"start_method \('thread'\) must be one of auto, popen"),
    ],
)
def test_wrong_settings_are_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeshStrategy(**settings)


@pytest.mark.parametrize("method", ["auto", "popen", "fork", "forkserver", "spawn"])
def test_start_method_chooses_the_launcher(method: Any) -> None:
    strategy = MeshStrategy(start_method=method)
    strategy.cluster_environment = LightningEnvironment()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy._configure_launcher()
    launcher = strategy.launcher
    if method in ("auto", "popen"):
        assert isinstance(launcher, _SubprocessScriptLauncher)
    else:
        assert isinstance(launcher, _MultiProcessingLauncher)
        assert launcher._start_method == method


def test_process_group_gets_back_end_and_timeout() -> None:
    strategy = MeshStrategy(process_group_backend="gloo", timeout=timedelta(seconds=77))
    # Lightning makes the process group of these.
    assert strategy._get_process_group_backend() == "gloo"
    assert strategy._timeout == timedelta(seconds=77)


def test_samples_are_divided_among_processes_that_share_no_sequence() -> None:
    strategy = MeshStrategy(context_parallel=ContextParallelConfig(degree=2))
    strategy.cluster_environment = LightningEnvironment()
    strategy.parallel_devices = [torch.device("cpu")] * 4
    strategy.set_world_ranks()
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}


def test_mesh_exists_once_processes_have_started() -> None:
    with pytest.raises(RuntimeError, match="shard_mesh is made when processes have started"):
        MeshStrategy().shard_mesh  # noqa: B018
