"""``Adagrad`` and ``Adadelta``: steps scaled by the gradients so far."""

from __future__ import annotations

from collections.abc import Iterable

from mpiddp.device import array_namespace

from .flat import ContiguousRun, Parameter
from .optimizer import Group, Optimizer, check_not_negative


class Adagrad(Optimizer):
    r"""Adagrad (Duchi et al., 2011).

    :math:`s \leftarrow s + g^2` from ``initial_accumulator_value`` on,
    :math:`p \leftarrow p - \eta g / (\sqrt{s} + \epsilon)`; step t has the rate ``lr / (1 + (t - 1) * lr_decay)``.
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[Group],
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        check_not_negative(
            **{
                "learning rate": lr,
                "lr_decay value": lr_decay,
                "weight_decay value": weight_decay,
                "initial_accumulator_value value": initial_accumulator_value,
                "epsilon value": eps,
            }
        )
        options = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, options)

    def _update(self, run: ContiguousRun, group: Group) -> None:
        lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
        if "sum" not in run.state:
            run.new_state("sum")[...] = group["initial_accumulator_value"]
        rate = lr / (1 + (run.count_step() - 1) * float(group["lr_decay"]))

        xp = array_namespace(run.data)
        for p, g, total in run.blocks("sum"):
            g, _, product = self._descent(p, g, group["maximize"], decay)
            total += xp.multiply(g, g, out=product)
            denominator = xp.sqrt(total, out=product)
            denominator += eps
            step = xp.divide(g, denominator, out=product)
            step *= rate
            p -= step


class Adadelta(Optimizer):
    r"""Adadelta (M. Zeiler, arXiv:1212.5701).

    :math:`v \leftarrow \rho v + (1 - \rho) g^2`, :math:`d = g \sqrt{u + \epsilon} / \sqrt{v + \epsilon}`,
    :math:`u \leftarrow \rho u + (1 - \rho) d^2`, :math:`p \leftarrow p - \eta d`; ``rho`` in [0, 1].
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[Group],
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
    ) -> None:
        check_not_negative(**{"learning rate": lr, "epsilon value": eps, "weight_decay value": weight_decay})
        if not 0 <= rho <= 1:
            raise ValueError(f"Invalid rho value: {rho}")
        options = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options)

    def _update(self, run: ContiguousRun, group: Group) -> None:
        lr, rho, eps, decay = (float(group[name]) for name in ("lr", "rho", "eps", "weight_decay"))
        run.count_step()

        xp = array_namespace(run.data)
        for p, g, square, delta in run.blocks("square_avg", "acc_delta"):
            g, update, product = self._descent(p, g, group["maximize"], decay)
            square *= rho
            xp.multiply(g, 1 - rho, out=product)
            square += xp.multiply(product, g, out=product)
            step = xp.divide(xp.sqrt(delta + eps), xp.sqrt(square + eps), out=product)
            step *= g
            delta *= rho
            xp.multiply(step, 1 - rho, out=update)
            delta += xp.multiply(update, step, out=update)
            step *= lr
            p -= step
