"""The models that the main job offers. Imports ``nn``."""

from __future__ import annotations

from typing import Any

from mpiddp import nn
from mpiddp.autograd import Tensor
from mpiddp.nn import functional as F  # noqa: N812 (its customary name)


class Net(nn.Module):
    """The tutorial's network for images of 28 x 28 pixels in 10 classes; returns log-probabilities.

    Parameters
    ----------
    dropout : float, default 0.5
        Probability with which a channel, and later a unit, is left out in training.

    References
    ----------
    S. Arnold, "Writing Distributed Applications with PyTorch"; the network is that of PyTorch's MNIST example.
    """

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


class MLP(nn.Module):
    """A perceptron with two hidden layers for images of 28 x 28 pixels in 10 classes; returns log-probabilities.

    Parameters
    ----------
    dropout : float, default 0.5
        Probability with which a hidden unit is left out in training.
    hidden : int, default 256
        Units of each hidden layer.
    """

    def __init__(self, dropout: float = 0.5, hidden: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(
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

    def forward(self, x: Any) -> Tensor:
        """Return log-probabilities (N, 10) of images (N, 1, 28, 28)."""
        output: Tensor = self.layers(x)
        return output


MODELS = {"net": Net, "mlp": MLP}
"""Models by the name that ``--model`` takes."""
