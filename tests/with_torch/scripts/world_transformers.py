"""transformers' Trainer on a tiny model of random weights: ``torchrun world_transformers.py FOLDER``."""

import os
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

if "BACKEND" in os.environ:
    dist.init_process_group(os.environ["BACKEND"])  # its option ddp_backend takes no names but torch's own
set_seed(1)
tokens = torch.randint(0, 32, (48, 16))
data = [{"input_ids": each, "labels": each} for each in tokens]
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    output_dir=sys.argv[1], use_cpu=True, num_train_epochs=2, logging_steps=2, report_to=[], disable_tqdm=True
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:20])
trainer.train()
losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
if trainer.is_world_process_zero():
    print("".join(f"loss {float(each):.5f}\n" for each in losses), flush=True)
evaluated = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print(f"loss {evaluated:.5f}", flush=True)
