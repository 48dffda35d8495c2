"""Heartbeats of all processes, so that those that wait for one that failed can name it."""

import contextlib
import threading
import time

from torch import distributed
from torch.distributed import Store

INTERVAL_SECONDS = 1.0


class Heartbeat:
    """Counter of one process in a shared store, which a thread increases also while a collective blocks.

    Args:
        store: Store that all processes share.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        # A connection of its own: one that waits would hold the other up.
        self._store = distributed.PrefixStore("lightning_dalle/heartbeat", store.clone())
        self._rank = rank
        self._world_size = world_size
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def report(self, failure: BaseException) -> None:
        """Record for the others that this process failed, and why."""
        with contextlib.suppress(distributed.DistError):
            self._report(failure)

    def explain(self, failure: BaseException, patience_seconds: float = 3 * INTERVAL_SECONDS) -> str:
        """Return which ranks ended without a word, or which one failed first; takes `patience_seconds`."""
        try:
            first = self._report(failure)
            before = self._beats()
            time.sleep(patience_seconds)
            after = self._beats()
            silent = [
                rank for rank in range(self._world_size) if before[rank] == after[rank] and not self._failed(rank)
            ]
        except distributed.DistError as error:
            return f"rank {self._rank} lost the store of the process group, which rank 0 holds: {error}"
        if silent:
            return f"rank {self._rank} was left by rank(s) {', '.join(map(str, silent))}, which ended without a word"
        return f"the first failure was of {first}"

    def _beat(self) -> None:
        # When the store is gone with rank 0, the main thread learns of it by its collectives.
        with contextlib.suppress(distributed.DistError):
            while not self._stopped.wait(INTERVAL_SECONDS):
                self._store.add(f"beats/{self._rank}", 1)

    def _beats(self) -> list[int]:
        return [self._store.add(f"beats/{rank}", 0) for rank in range(self._world_size)]

    def _report(self, failure: BaseException) -> str:
        description = f"rank {self._rank}: {type(failure).__name__}: {failure}"
        self._store.set(f"failed/{self._rank}", description)
        return self._store.compare_set("first", "", description).decode()

    def _failed(self, rank: int) -> bool:
        return self._store.check([f"failed/{rank}"])
