"""The seven operations through which the cache touches a device, and nothing else."""

from collections.abc import Sequence
from typing import Protocol

import torch

from memkv_pp.errors import ConfigError, InternalError


class Device(Protocol):
    """Memory of one device; every operation is ordered on the stage's stream."""

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors lie."""
        ...

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A new 1-D tensor of zeros."""
        ...

    def uninit(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A new 1-D tensor with undefined content."""
        ...

    def bytes(self, num_bytes: int) -> torch.Tensor:
        """A new 1-D uint8 tensor with undefined content."""
        ...

    def to_device_i32(self, values: Sequence[int]) -> torch.Tensor:
        """A new int32 tensor with ``values``."""
        ...

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        """A real copy: changing either leaves the other."""
        ...

    def copy_into(
        self, target: torch.Tensor, offset: int, source: torch.Tensor, num_elements: int
    ) -> None:
        """Copy the first ``num_elements`` of ``source`` to ``target[offset:]`` (both 1-D, one dtype).

        InternalError, with nothing copied, when either range leaves its tensor.
        """
        ...

    def set_i32(self, target: torch.Tensor, index: int, value: int) -> None:
        """Write one int32 in place: the address of ``target`` stays what graphs remember."""
        ...


class TorchDevice:
    """A CPU or CUDA device by its torch name."""

    def __init__(self, name: str = "cpu") -> None:
        try:
            self._device = torch.device(name)
        except RuntimeError as error:
            raise ConfigError(f"--devices: {name!r} is no device", "write cpu or cuda:0") from error
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"--devices: {name!r} was asked for, but torch sees no CUDA device",
                "use cpu, or install a CUDA build of torch",
            )

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors lie."""
        return self._device

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A new 1-D tensor of zeros."""
        return torch.zeros(num_elements, dtype=dtype, device=self._device)

    def uninit(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A new 1-D tensor with undefined content."""
        return torch.empty(num_elements, dtype=dtype, device=self._device)

    def bytes(self, num_bytes: int) -> torch.Tensor:
        """A new 1-D uint8 tensor with undefined content."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def to_device_i32(self, values: Sequence[int]) -> torch.Tensor:
        """A new int32 tensor with ``values``."""
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        """A real copy."""
        return source.to(self._device, copy=True)

    def copy_into(
        self, target: torch.Tensor, offset: int, source: torch.Tensor, num_elements: int
    ) -> None:
        """Copy elements into ``target`` from ``offset`` on."""
        end = offset + num_elements
        if offset < 0 or num_elements < 0 or end > target.numel() or num_elements > source.numel():
            raise InternalError(
                f"copy of {num_elements} elements to [{offset}, {end}) leaves a target of"
                f" {target.numel()} or a source of {source.numel()}"
            )
        target[offset:end].copy_(source[:num_elements])

    def set_i32(self, target: torch.Tensor, index: int, value: int) -> None:
        """Write one int32 in place."""
        target[index].fill_(value)
