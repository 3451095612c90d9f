"""``SGD``: stochastic gradient descent with momentum."""

from collections.abc import Iterable

from mpiddp.device import array_namespace

from .flat import ContiguousRun, Parameter
from .optimizer import Group, Optimizer, check_not_negative


class SGD(Optimizer):
    r"""Stochastic gradient descent with momentum (Sutskever et al., 2013).

    With :math:`g = \nabla f(p) + \lambda p`, momentum :math:`\mu`, dampening :math:`\tau` and a buffer :math:`b` that
    starts as :math:`g`: :math:`b \leftarrow \mu b + (1 - \tau) g`, then :math:`p \leftarrow p - \eta b`, or with
    ``nesterov``, which needs momentum and no dampening, :math:`p \leftarrow p - \eta (g + \mu b)`. Without momentum,
    :math:`p \leftarrow p - \eta g`.
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[Group],
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
    ) -> None:
        check_not_negative(**{"learning rate": lr, "momentum value": momentum, "weight_decay value": weight_decay})
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        options = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, options)

    def _update(self, run: ContiguousRun, group: Group) -> None:
        lr, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
        fresh = 1 - float(group["dampening"])
        first = momentum != 0 and "momentum_buffer" not in run.state
        xp = array_namespace(run.data)
        for p, g, *state in run.blocks(*["momentum_buffer"] if momentum else []):
            g, update, product = self._descent(p, g, decay)
            if momentum:
                (buffer,) = state
                if first:
                    buffer[...] = g
                else:
                    buffer *= momentum
                    buffer += g if fresh == 1 else xp.multiply(g, fresh, out=product)
                g = xp.add(g, xp.multiply(buffer, momentum, out=product), out=update) if group["nesterov"] else buffer
            p -= xp.multiply(g, lr, out=product)
