"""Lightning's Trainer, with torchmetrics, and Fabric: ``torchrun world_lightning.py FOLDER``."""

import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

BACKEND, SIZE = os.environ.get("BACKEND", "gloo"), int(os.environ["WORLD_SIZE"])


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.accuracy = nn.Linear(4, 2), MulticlassAccuracy(2)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        outputs = self.layer(batch[0])
        loss = nn.functional.cross_entropy(outputs, batch[1])
        self.accuracy(outputs, batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("loss", loss, sync_dist=True, on_epoch=True)  # an AVG of integers, unless it sees the name "gloo"
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(1)
data = TensorDataset(x := torch.randn(64, 4), (x.sum(1) > 0).long())
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
strategy = DDPStrategy(process_group_backend=BACKEND)
trainer = lightning.Trainer(
    accelerator="cpu", devices=SIZE, max_epochs=2, strategy=strategy, default_root_dir=Path(sys.argv[1]), **quiet
)
trainer.fit(Model(), DataLoader(data, batch_size=8))
if trainer.is_global_zero:
    print(f"loss {trainer.callback_metrics['loss_epoch']:.6f} {trainer.callback_metrics['accuracy']:.6f}")

fabric = lightning.Fabric(accelerator="cpu", devices=SIZE, strategy="ddp")
fabric.launch()
torch.manual_seed(2)
model = nn.Linear(4, 2)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x, y in fabric.setup_dataloaders(DataLoader(data, batch_size=8)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    fabric.backward(loss)
    optimizer.step()
fabric.print(f"loss {fabric.all_reduce(loss.detach()):.6f}")
