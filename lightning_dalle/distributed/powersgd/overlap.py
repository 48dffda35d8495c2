"""First factors of PowerSGD that cross the slow link while the backward pass that makes the gradients goes on."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby

import torch
from torch import Tensor, distributed
from torch.distributed import Work

from lightning_dalle.distributed.powersgd.compressor import PowerSGD
from lightning_dalle.ops.finite import to_local

# More would hide more of the link, but each costs processor time and headers of its own.
_MESSAGES = 3


class EarlyFactors:
    """Sends the first factors of gradients as soon as the last backward pass of an update has made them.

    Collectives must be called in the same order on all processes of a group, whatever each one's graph is. So the first
    update only notes the order in which gradients come, that of the group's first process counts for all, and is cut
    into a few messages. A message waits for those before it and for all of its factors; what never comes, as the
    gradient of an unused parameter, is sent when it is asked for.
    Noted is also in how many parts each gradient comes, which are several where checkpoints run backward passes of
    their own.

    Whatever changes a gradient afterwards, as `on_after_backward` may, counts for the mean, but not for its basis.

    Args:
        parameters: In the order of the compressor's tensors.
    """

    def __init__(self, compressor: PowerSGD, parameters: Sequence[Tensor]) -> None:
        self._compressor = compressor
        self._parameters = parameters
        self._matrices = {matrix.place: matrix for matrix in compressor.plan.matrices}
        self._messages: list[list[int]] = []
        self._parts: Counter[int] = Counter()
        self._begin(is_listening=False)
        self._handles = [
            parameters[place].register_post_accumulate_grad_hook(partial(self._on_gradient, place))
            for place in self._matrices
        ]

    def begin(self) -> None:
        """Send during the backward pass that comes now, unless this update travels whole."""
        steps, config = self._compressor.steps, self._compressor.config
        self._begin(is_listening=bool(self._matrices) and steps >= config.start_powersgd_iter)

    @torch.no_grad()
    def take(self) -> list[Tensor] | None:
        """The mean first factors in the order of the plan, or None if they are yet to be computed.

        All processes of the group must call it.
        """
        if not self._is_listening:
            return None
        factors = self._finish() if self._messages else None
        if factors is None:
            self._parts = self._arrived
            self._agree_on_order()
        self._begin(is_listening=False)
        return factors

    def close(self) -> None:
        """Leave the parameters as they were."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, is_listening: bool) -> None:
        self._is_listening = is_listening
        self._arrived: Counter[int] = Counter()
        self._made: dict[int, None] = {}
        self._sent: list[tuple[Tensor, Work]] = []

    @torch.no_grad()
    def _on_gradient(self, place: int, parameter: Tensor) -> None:
        if not self._is_listening:
            return
        self._arrived[place] += 1
        if self._messages and self._arrived[place] < self._parts[place]:
            return
        # The last part counts.
        self._made.pop(place, None)
        self._made[place] = None
        while len(self._sent) < len(self._messages) and self._made.keys() >= set(self._messages[len(self._sent)]):
            self._send(self._messages[len(self._sent)])

    def _send(self, message: list[int]) -> None:
        size = self._compressor.group.size()
        factors = [self._factor(place).reshape(-1) for place in message]
        joined = torch.cat(factors).div_(size)
        work = distributed.all_reduce(joined, group=self._compressor.group, async_op=True)
        assert work is not None
        self._sent.append((joined, work))
        self._compressor.traffic.sent += 2 * (size - 1) * joined.numel() * joined.element_size() // size

    def _factor(self, place: int) -> Tensor:
        gradient = self._parameters[place].grad
        return self._compressor.first_factor(self._matrices[place], None if gradient is None else to_local(gradient))

    def _finish(self) -> list[Tensor]:
        for message in self._messages[len(self._sent) :]:
            self._send(message)
        means: dict[int, Tensor] = {}
        for message, (joined, work) in zip(self._messages, self._sent, strict=True):
            work.wait()
            parts = joined.split([self._num_sent(place) for place in message])
            means |= {
                place: part.view(-1, self._matrices[place].rank) for place, part in zip(message, parts, strict=True)
            }
        return [means[place] for place in self._matrices]

    def _num_sent(self, place: int) -> int:
        return self._matrices[place].rows * self._matrices[place].rank

    def _agree_on_order(self) -> None:
        rest = (place for place in self._matrices if place not in self._made)
        order = torch.tensor([*self._made, *rest], device=self._parameters[0].device)
        distributed.broadcast(order, group=self._compressor.group, group_src=0)
        self._messages = self._cut(order.tolist())

    def _cut(self, order: list[int]) -> list[list[int]]:
        """Messages of about equal size; the order stays."""
        starts = [0, *accumulate(self._num_sent(place) for place in order)]
        numbers = {place: start * _MESSAGES // starts[-1] for place, start in zip(order, starts[:-1], strict=True)}
        return [list(places) for _, places in groupby(order, key=numbers.__getitem__)]
