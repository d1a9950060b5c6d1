"""How work on a GPU slows other work there, where several jobs use one at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence


class Crowding:
    """What is at work on each GPU. Beside n others a piece of work takes 1 + n x `slows` times as long."""

    def __init__(self, slows: float) -> None:
        self._slows = slows
        self._at_work: dict[int, dict[Hashable, Callable[[], None]]] = defaultdict(dict)

    def begin(self, who: Hashable, gpus: Sequence[int], changed: Callable[[], None] = lambda: None) -> None:
        """Work begins on GPUs. `changed`: called whenever its `factor` may be another from now on."""
        for gpu in gpus if self._slows else ():
            self._at_work[gpu][who] = changed
        self._tell(who, gpus)

    def end(self, who: Hashable, gpus: Sequence[int]) -> None:
        """The work is over, or had not begun."""
        for gpu in gpus:
            self._at_work[gpu].pop(who, None)
        self._tell(who, gpus)

    def factor(self, who: Hashable, gpus: Sequence[int]) -> float:
        """How many times as long as alone work takes here now: that on the fullest of its GPUs counts."""
        return 1.0 + self._slows * max(len(self._at_work[gpu].keys() - {who}) for gpu in gpus)

    def _tell(self, who: Hashable, gpus: Sequence[int]) -> None:
        others = {other: changed for gpu in gpus for other, changed in self._at_work[gpu].items() if other != who}
        for changed in others.values():
            changed()
