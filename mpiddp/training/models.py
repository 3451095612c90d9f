"""The models that ``python -m mpiddp train --model`` offers by name."""
# mypy: disable-error-code="no-any-return"

from typing import Any

from mpiddp import nn
from mpiddp.autograd import Tensor
from mpiddp.nn import functional as F  # noqa: N812


class Net(nn.Module):
    """The network of PyTorch's MNIST example and distributed tutorial: 28 x 28 pixels, 10 classes, log-probabilities.

    Parameters
    ----------
    dropout : float
        Probability with which a channel of the second convolution, or a unit of the first linear layer, is dropped.
    """

    loss_fn = staticmethod(F.nll_loss)

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(320, 50)
        self.fc1_drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: Any) -> Tensor:
        """Return log-probabilities (N, 10) of images (N, 1, 28, 28)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))  # (N, 10, 12, 12)
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))  # (N, 20, 4, 4)
        x = F.relu(self.fc1(x.reshape(len(x), -1)))  # (N, 50)
        return F.log_softmax(self.fc2(self.fc1_drop(x)), dim=1)


def perceptron(nn: Any, hidden: int, dropout: float = 0.5) -> Any:
    """Return the layers of `MLP`. ``nn`` is ``mpiddp.nn`` or, in benchmarks, ``torch.nn``."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, 10),
        nn.LogSoftmax(dim=1),
    )


class MLP(nn.Module):
    """A perceptron with two hidden layers: 28 x 28 pixels, 10 classes, log-probabilities.

    Parameters
    ----------
    dropout : float
    hidden : int
        Units of each hidden layer.
    """

    loss_fn = staticmethod(F.nll_loss)

    def __init__(self, dropout: float = 0.5, hidden: int = 256) -> None:
        super().__init__()
        self.layers = perceptron(nn, hidden, dropout)

    def forward(self, x: Any) -> Tensor:
        """Return log-probabilities (N, 10) of images (N, 1, 28, 28)."""
        return self.layers(x)


class ResNet(nn.Module):
    """A small residual network (K. He et al., CVPR 2016) with batch normalisation; returns scores of 10 classes.

    Parameters
    ----------
    dropout : float
        Probability with which a channel is dropped before the last layer.
    width : int
        Channels of the first stage; the second has twice as many at half the resolution.
    """

    def __init__(self, dropout: float = 0.0, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, kernel_size=3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential(ResidualBlock(width, width), ResidualBlock(width, 2 * width, stride=2))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Any) -> Tensor:
        """Return scores (N, 10) of images (N, 1, H, W)."""
        x = F.relu(self.stem_norm(self.stem(x)))  # (N, width, H / 2, W / 2)
        x = self.stages(x)  # (N, 2 * width, H / 4, W / 4)
        return self.head(self.drop(x.mean((2, 3))))


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalization, whose output is added to the input.

    If the shapes differ, a convolution of size 1 brings the input to the output's shape.
    """

    def __init__(self, channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out_channels, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Any) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


MODELS: dict[str, type[nn.Module]] = {"net": Net, "mlp": MLP, "resnet": ResNet}
"""The models, by their names in ``--model``."""
