"""Parameters of units, and their gradients, as views of the tensors that hold them: what actions of the model share."""

from __future__ import annotations

import torch

from slideformer.engine.reach import Reach
from slideformer.kernels.linear_cross_entropy import Softmax
from slideformer.layout import UnitKind
from slideformer.model.decoder import Decoder


class ModelActions:
    """Of one engine. Views are made once: the tensors that hold units stay where they are."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.layout = decoder, decoder.layout
        self._softmax = Softmax(decoder.projection.scale, decoder.projection.softcap)
        self._final = self.layout.find(UnitKind.FINAL)
        self._views: dict[tuple[int, int, bool | None], dict[str, torch.Tensor]] = {}

    def _params(self, unit: int, flat: torch.Tensor, *, requires_grad: bool) -> dict[str, torch.Tensor]:
        key = (unit, flat.data_ptr(), requires_grad)
        if key not in self._views:
            self._views[key] = self.decoder.views(unit, flat, requires_grad=requires_grad)
        return self._views[key]

    def _final_params(self, reach: Reach, *, requires_grad: bool) -> dict[str, torch.Tensor]:
        if self._final is None:
            return {}
        return self._params(self._final, reach["final"], requires_grad=requires_grad)

    def _bias(self, final: dict[str, torch.Tensor]) -> torch.Tensor | None:
        name = self.decoder.projection.bias
        return None if name is None else final[name]

    def _grad_views(self, unit: int, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the trained prefix of a unit's gradient, one a parameter, in flat order."""
        key = (unit, flat.data_ptr(), None)
        if key not in self._views:
            layout_unit = self.layout.units[unit]
            self._views[key] = {
                p.name: flat.detach()[layout_unit.offsets[p.name] :][: p.numel].view(p.shape)
                for p in layout_unit.params
                if p.trainable
            }
        return self._views[key]

    def _accumulate(self, unit: int, flat: torch.Tensor, grads: dict[str, torch.Tensor], *, first: bool) -> None:
        views = self._grad_views(unit, flat)
        ordered = [grads[name] for name in views]
        if first:
            torch._foreach_copy_(list(views.values()), ordered)
        else:
            torch._foreach_add_(list(views.values()), ordered)
