"""Parameters of PyTorch in one vector, which one call of a collective sends."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mpicoll.torch.tensor_memory import empty


class FlatParameters:
    """Copies between parameters and one vector with all their elements.

    Parameters
    ----------
    parameters
        Tensors of the CPU, all of float32 or all of float64; those that need no gradient are left out.

    Attributes
    ----------
    vector : tensor of shape (count,)
        The elements, in the order of the parameters, in memory that the ranks of a node share.

    Raises
    ------
    ValueError
        If there are none, or several dtypes, or one that is neither float32 nor float64.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = [each for each in parameters if each.requires_grad]
        dtypes = {each.dtype for each in self.parameters}
        if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
            found = ", ".join(sorted(map(str, dtypes))) or "none that needs a gradient"
            raise ValueError(f"parameters: they must all be float32 or all float64; found {found}")
        self.vector = empty(sum(each.numel() for each in self.parameters), dtype=dtypes.pop())

    def parts_of(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a vector in the shapes of the parameters."""
        parts = vector.split([each.numel() for each in self.parameters])
        return [part.view(each.shape) for part, each in zip(parts, self.parameters, strict=True)]

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """Copy the parameters to the vector; return it."""
        torch._foreach_copy_(self.parts_of(self.vector), [each.detach() for each in self.parameters])
        return self.vector

    @torch.no_grad()
    def write(self, vector: torch.Tensor) -> None:
        """Copy a vector to the parameters."""
        torch._foreach_copy_([each.detach() for each in self.parameters], self.parts_of(vector))

    @torch.no_grad()
    def read_gradients(self) -> torch.Tensor:
        """Copy the gradients, also sparse ones, to the vector, zeros for those that are None; return it."""
        for part, parameter in zip(self.parts_of(self.vector), self.parameters, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad.to_dense())
        return self.vector
