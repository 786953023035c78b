"""What torch keeps of tensors under private names."""

from __future__ import annotations

import torch


def version_of(tensor: torch.Tensor) -> tuple:
    """Differs once a tensor has been changed (as far as torch keeps count)."""
    return tensor.data_ptr(), tensor.device, -1 if tensor.is_inference() else tensor._version
