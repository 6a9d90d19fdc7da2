"""Train a small network to read the 1,797 handwritten digits of scikit-learn, 8x8 pixels each.

    python examples/digits.py --plot digits.svg

The convolutions run on the first GPU, or without one on the CPU (PoCL); the script is the same.
"""

import argparse
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import pycuda_conv.nn as pn


def data(device: str) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels to train with, and every fifth to test with."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32, device=device)[:, None] / 16
    labels = torch.tensor(digits.target, device=device)
    test = torch.arange(len(x)) % 5 == 0
    return (x[~test], labels[~test]), (x[test], labels[test])


def network() -> nn.Module:
    return nn.Sequential(
        pn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        pn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        pn.Conv2d(32, 32, 3, padding=1, groups=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def train(model: nn.Module, device: str, epochs: int, size: int) -> tuple[list[float], list[float]]:
    """The loss of every step, and the test accuracy in percent after every epoch."""
    (x, labels), (test_x, test_labels) = data(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, accuracies = [], []
    for epoch in range(epochs):
        started = time.perf_counter()
        model.train()
        # whole batches only, so that all steps weigh alike
        for chosen in torch.randperm(len(x), device=device)[: len(x) // size * size].split(size):
            loss = nn.functional.cross_entropy(model(x[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            right = (model(test_x).argmax(1) == test_labels).float().mean().item()
        accuracies.append(100 * right)
        took = time.perf_counter() - started
        print(f"epoch {epoch + 1:2}  loss {losses[-1]:.4f}  test accuracy {accuracies[-1]:.1f} %  {took:.2f} s", flush=True)
    return losses, accuracies


def plot(losses: list[float], accuracies: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = len(losses) // len(accuracies)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.semilogy([step / steps for step in range(len(losses))], losses, linewidth=1)
    left.set(xlabel="epoch", ylabel="training loss")
    right.plot(range(1, len(accuracies) + 1), accuracies, marker="o", markersize=3)
    right.set(xlabel="epoch", ylabel="test accuracy, %", title=f"{accuracies[-1]:.1f} % in the end")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):  # words stay words in an SVG
        figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=100, help="images in a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, help="where to draw loss and accuracy")
    args = parser.parse_args()
    torch.manual_seed(0)
    losses, accuracies = train(network().to(args.device), args.device, args.epochs, args.batch)
    if args.plot:
        plot(losses, accuracies, args.plot)
        print(f"{args.plot} drawn")


if __name__ == "__main__":
    main()
