"""A copy plan leaves on a GPU what the loader leaves, with fewer kernels than there are tensors, also after its memory
was written over.

Run where GPUs are: `python -m pytest tests/gpu -v`. Without one it is skipped.
"""

from __future__ import annotations

import pytest
import torch

from nemo_rl.weight_sync.copy_plan import CopyPlans
from nemo_rl.weight_sync.layout import Window
from tests.weight_sync.test_copy_plan import Shard, equal, sent, session, state, windows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("stored", "travels"), [("bfloat16", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replay_on_a_gpu_leaves_the_bits_that_the_loader_leaves(stored: str, travels: str, ranks: int) -> None:
    model, expected = (Shard(ranks - 1, ranks, dtype=stored).cuda() for _ in range(2))
    plans = CopyPlans(lambda: model)
    first, later = (
        [Window(window.bytes_B.cuda(), window.buckets) for window in windows(sent(seed, dtype=travels), 1024)]
        for seed in (1, 2)
    )
    assert not any(session(plans, first, model.load_weights)) and plans.refusal is None
    for tensor in model.state_dict().values():
        tensor.fill_(7)
    assert all(session(plans, later, model.load_weights))
    for window in later:
        expected.load_weights(window)
    assert equal(state(model), state(expected))


def test_tensors_that_are_laid_out_alike_go_by_few_kernels() -> None:
    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList(torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(200))

        def load_weights(self, weights: object) -> None:
            for name, tensor in weights:  # type: ignore[attr-defined]
                self.layers[int(name)].data.copy_(tensor)

    model = Layers().cuda()
    plans = CopyPlans(lambda: model)
    tensors = {str(number): torch.full((64, 64), float(number), dtype=torch.bfloat16) for number in range(200)}
    parts = [Window(window.bytes_B.cuda(), window.buckets) for window in windows(tensors, 64 << 20)]
    session(plans, parts, model.load_weights)
    assert plans.refusal is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        assert session(plans, parts, model.load_weights) == [True]
        torch.cuda.synchronize()
    assert sum(event.count for event in seen.key_averages() if event.device_time_total) < 50
    assert all(float(layer[0, 0]) == number for number, layer in enumerate(model.layers))
