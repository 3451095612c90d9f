"""``RMSprop``."""

from __future__ import annotations

from collections.abc import Iterable

from mpiddp.device import array_namespace

from .flat import ContiguousRun, Parameter
from .optimizer import Group, Optimizer, check_not_negative


class RMSprop(Optimizer):
    r"""RMSprop (G. Hinton, Neural Networks for Machine Learning, lecture 6, 2012).

    :math:`v \leftarrow \alpha v + (1 - \alpha) g^2`, :math:`p \leftarrow p - \eta g / (\sqrt{v} + \epsilon)`.
    ``momentum`` is the share of the previous update that goes on; ``centered`` divides by the gradient's standard
    deviation (A. Graves, arXiv:1308.0850).
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[Group],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        check_not_negative(
            **{
                "learning rate": lr,
                "epsilon value": eps,
                "momentum value": momentum,
                "weight_decay value": weight_decay,
                "alpha value": alpha,
            }
        )
        options = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
            "maximize": maximize,
        }
        super().__init__(params, options)

    def _update(self, run: ContiguousRun, group: Group) -> None:
        lr, alpha, eps = float(group["lr"]), float(group["alpha"]), float(group["eps"])
        momentum, decay = float(group["momentum"]), float(group["weight_decay"])
        extra = ["momentum_buffer"] * (momentum > 0) + ["grad_avg"] * group["centered"]
        run.count_step()

        xp = array_namespace(run.data)
        for p, g, square, *others in run.blocks("square_avg", *extra):
            g, update, product = self._descent(p, g, group["maximize"], decay)
            square *= alpha
            xp.multiply(g, 1 - alpha, out=product)
            square += xp.multiply(product, g, out=product)
            if group["centered"]:
                mean = others[-1]
                xp.subtract(g, mean, out=product)
                mean += xp.multiply(product, 1 - alpha, out=product)
                xp.multiply(mean, mean, out=product)
                denominator = xp.subtract(square, product, out=product)
                xp.sqrt(denominator, out=denominator)
            else:
                denominator = xp.sqrt(square, out=product)
            denominator += eps
            step = xp.divide(g, denominator, out=update)
            if momentum > 0:
                step = others[0]
                step *= momentum
                step += update
            p -= xp.multiply(step, lr, out=product)


__all__ = ["RMSprop"]
