"""Train a small network on several processes with DistributedDataParallel, each of which has its part of every batch.

    python examples/ddp.py --processes 2 --check

One process a GPU, talking through NCCL, if there are so many GPUs; else all on the CPU (gloo). With ``--check`` the gradients of
every step are compared with those of one process that has the whole batch.
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycuda_conv.nn as pn


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        pn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), pn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2), nn.ReLU(),
        pn.ConvTranspose2d(16, 4, 2, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, whose label says whether its mean is positive."""
    x = torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(step))
    x += torch.where(torch.arange(size) % 2 == 0, 0.5, -0.5).view(-1, 1, 1, 1)
    return x, (x.mean((1, 2, 3)) > 0).long()


def train(rank: int, args: argparse.Namespace) -> None:
    """What one of the processes does."""
    gpus = torch.cuda.device_count() >= args.processes
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", rank=rank, world_size=args.processes)
    model = DistributedDataParallel(network().to(device), device_ids=[rank] if gpus else None)
    alone = network().to(device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2) for m in (model, alone)]
    worst = 0.0
    for step in range(args.steps):
        x, labels = (t.to(device) for t in batch(step, args.batch))
        mine = slice(rank, None, args.processes)
        loss = nn.functional.cross_entropy(model(x[mine]), labels[mine])
        optimizers[0].zero_grad()
        loss.backward()
        if args.check:
            optimizers[1].zero_grad()
            nn.functional.cross_entropy(alone(x), labels).backward()
            for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
                worst = max(worst, ((ours.grad - expected.grad).norm() / expected.grad.norm()).item())
            optimizers[1].step()
        optimizers[0].step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)
    if args.check:
        assert worst < 1e-4, f"process {rank}: the gradients differ by {worst:.1e}"
        if rank == 0:
            print(f"the gradients agree with those of one process to {worst:.1e}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network with DistributedDataParallel.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64, help="images in all processes together")
    parser.add_argument("--check", action="store_true", help="compare the gradients with those of one process")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    mp.spawn(train, (args,), args.processes)


if __name__ == "__main__":
    main()
