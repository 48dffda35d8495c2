"""Runs one function on several ranks of a Gloo group, each in a forked process of its own."""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# What most ranks import; each would take seconds to do it again.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "lightning.pytorch",
]

# A module-level function of picklable arguments: (rank, *arguments) -> something picklable.
RankFunction = Callable[..., Any]


def run_ranks(
    function: RankFunction, world_size: int, *arguments: Any, timeout: float = 150.0, wait_for_all: bool = False
) -> list[Any]:
    """Runs `function(rank, *arguments)` on every rank and returns the results in the order of ranks.

    The group meets through a file, so that tests at the same time never share a port. Preloading torch makes a rank
    start in about a second; `torch._dynamo` is imported by the first optimizer.

    Args:
        timeout: Seconds until ranks that do not answer count as hanging: long, since other tests may run beside this
            one, and below the timeout of a test, so that the ranks are named.
        wait_for_all: Let the ranks that are left end by themselves after one has failed.

    Raises:
        RuntimeError: With the traceback of the first rank that failed, or the names of the ranks that did not answer in
            time. The other ranks are killed: they may wait for the failed one for ever.
        ExceptionGroup: Of such errors with `wait_for_all`, one for each rank that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=_run_rank, args=(function, rank, world_size, Path(folder), pipe[1], arguments))
            for rank, pipe in enumerate(pipes)
        ]
        try:
            for process, (_, writer) in zip(processes, pipes, strict=True):
                process.start()
                writer.close()
            return _collect([reader for reader, _ in pipes], timeout, wait_for_all)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for reader, _ in pipes:
                reader.close()


def _collect(readers: list[Connection], timeout: float, wait_for_all: bool) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[Exception] = []
    deadline = time.monotonic() + timeout
    while waiting := [reader for rank, reader in enumerate(readers) if rank not in results]:
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = [rank for rank in range(len(readers)) if rank not in results]
            raise RuntimeError(f"ranks {ranks} gave no answer within {timeout} s")
        for reader in ready:
            rank = readers.index(reader)  # type: ignore[arg-type]
            try:
                results[rank] = _receive(rank, readers[rank])
            except RuntimeError as failure:
                if not wait_for_all:
                    raise
                results[rank] = None
                failures.append(failure)
    if failures:
        raise ExceptionGroup("ranks failed", failures)
    return [results[rank] for rank in range(len(readers))]


def _receive(rank: int, reader: Connection) -> Any:
    try:
        succeeded, answer = reader.recv()
    except EOFError as error:
        raise RuntimeError(f"rank {rank} died without an answer") from error
    if not succeeded:
        raise RuntimeError(f"rank {rank} failed:\n{answer}")
    return answer


def _run_rank(
    function: RankFunction, rank: int, world_size: int, folder: Path, writer: Connection, arguments: tuple[Any, ...]
) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    # The fork server has the environment of the first test that needed ranks; Lightning would seed by that test's seed.
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        # In a frame of its own: a DDP wrapper that is still alive when the group is destroyed hangs the rank.
        answer = pickle.dumps((True, function(rank, *arguments)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    writer.send_bytes(answer)
    writer.close()
    distributed.destroy_process_group()
