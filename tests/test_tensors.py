"""Tensors on disk."""

import torch

from mtem.tensors import read_tensors, write_tensors


def test_tensors_round_trip(tmp_path):
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {
        "plain": base,
        "shared": base,
        "turned": base.t(),
        "part": base[1:, ::2],
        "half": torch.tensor([1.5, -2.0, 3e38], dtype=torch.bfloat16),
        "step": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "state": torch.get_rng_state(),
        "leaf": torch.nn.Parameter(torch.ones(2)),
    }
    write_tensors(tmp_path / "a.safetensors", tensors)
    found = read_tensors(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape and torch.equal(found[name], value), name
    assert not found["leaf"].requires_grad and [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
