"""Trains a small convolutional network on scikit-learn's digits with Accelerate, on machines that
come and go.

    commhooks lighthouse  # prints the variable to set in two other terminals, or machines
    TORCHFT_LIGHTHOUSE=http://HOST:29510 python examples/members_accelerate.py --name a
    TORCHFT_LIGHTHOUSE=http://HOST:29510 python examples/members_accelerate.py --name b

Kill one of them: the other goes on after a few seconds. Start it again: it takes the state of the
other, and trains with it from the next outer step on. The lines to copy are those with
`CommHookKwargs`, `attach` and `members.register`; the rest is an ordinary Accelerate script, which
each machine starts for itself.
"""

import argparse

import torch
from accelerate import Accelerator
from digits import digits, digits_net
from torch import nn
from torch.utils.data import DataLoader

import commhooks
from accelerate_commhooks import CommHookKwargs


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--name", help="of this machine, different on each; by default the host name"
    )
    parser.add_argument("--steps", type=int, default=10_000)
    return parser


def main() -> None:
    args = arguments().parse_args()
    torch.set_num_threads(1)  # several machines on one host
    members = commhooks.Torchft(name=args.name, timeout_s=30)
    handler = CommHookKwargs(hook="diloco", hook_options={"sync_every": 20}, members=members)
    accelerator = Accelerator(cpu=True)
    handler.attach(accelerator)  # before prepare
    train, test = digits()  # each machine shuffles with a seed of its own
    model = digits_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    train_loader = DataLoader(train, batch_size=32, shuffle=True)
    test_loader = DataLoader(test, batch_size=180)
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )

    # What a machine that comes takes from another one, beside the weights, the optimizer and the
    # scheduler.
    done = {"steps": 0}
    handler.attached.members.register("steps", lambda: dict(done), done.update)

    model.train()
    while done["steps"] < args.steps:
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            done["steps"] += 1
            if done["steps"] % 100 == 0:
                accelerator.print(
                    f"step {done['steps']}, loss {loss.item():.3f},"
                    f" {handler.attached.members.names}"
                )
            if done["steps"] >= args.steps:
                break

    model.eval()
    with torch.no_grad():
        right = torch.cat([model(images).argmax(dim=1) == labels for images, labels in test_loader])
    stats = handler.attached.stats()
    accelerator.print(f"test accuracy {right.float().mean():.2%}, {stats['step']} rounds")


if __name__ == "__main__":
    main()
