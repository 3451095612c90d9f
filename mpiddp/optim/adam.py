"""``Adam`` and ``AdamW``."""

from collections.abc import Iterable
from math import sqrt

from mpiddp.device import array_namespace

from .flat import ContiguousRun, Parameter
from .optimizer import Group, Optimizer, check_not_negative


class Adam(Optimizer):
    r"""Adam (D. P. Kingma and J. Ba, arXiv:1412.6980).

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) g`, :math:`v \leftarrow \beta_2 v + (1 - \beta_2) g^2`, and in step t
    :math:`p \leftarrow p - \frac{\eta}{1 - \beta_1^t} m / (\sqrt{v / (1 - \beta_2^t)} + \epsilon)`; ``betas`` are in
    [0, 1).
    """

    decoupled_weight_decay = False

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[Group],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
    ) -> None:
        check_not_negative(**{"learning rate": lr, "epsilon value": eps, "weight_decay value": weight_decay})
        for i, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, run: ContiguousRun, group: Group) -> None:
        lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        step = run.count_step()
        step_size = lr / (1 - beta1**step)
        correction = sqrt(1 - beta2**step)

        xp = array_namespace(run.data)
        for p, g, mean, square in run.blocks("exp_avg", "exp_avg_sq"):
            if self.decoupled_weight_decay and decay:
                p *= 1 - lr * decay
            coupled = 0 if self.decoupled_weight_decay else decay
            g, update, product = self._descent(p, g, coupled)

            xp.subtract(g, mean, out=product)
            if beta1 > 0.5:
                mean += xp.multiply(product, 1 - beta1, out=product)
            else:  # interpolate from the end that is nearer, as torch's lerp does, to round less
                xp.subtract(g, xp.multiply(product, beta1, out=product), out=mean)
            square *= beta2
            xp.multiply(g, 1 - beta2, out=product)
            square += xp.multiply(product, g, out=product)

            denominator = xp.sqrt(square, out=product)
            denominator /= correction
            denominator += eps
            xp.multiply(mean, step_size, out=update)
            p -= xp.divide(update, denominator, out=update)


class AdamW(Adam):
    r"""Adam with decoupled weight decay (arXiv:1711.05101).

    Each step begins with :math:`p \leftarrow (1 - \eta \lambda) p`.
    """

    decoupled_weight_decay = True

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[Group],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)
