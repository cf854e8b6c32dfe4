"""The same Transformer on many GPUs with ddp_hpc: any launcher, uneven data, one error for the whole job."""

import argparse

import torch

import ddp_hpc

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--num-samples", type=int, default=2048)
parser.add_argument("--embedding", type=int, default=512)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--no-shuffle", action="store_true")
args = parser.parse_args()

with ddp_hpc.distributed() as world:
    torch.manual_seed(0)
    src = torch.rand(args.num_samples, 1, args.embedding)
    tgt = torch.rand(args.num_samples, 20, args.embedding)
    loader = world.loader((src, tgt), batch_size=32, shuffle=not args.no_shuffle, epochs=args.epochs)

    model = torch.nn.Transformer(args.embedding, dropout=args.dropout, batch_first=True)
    model = ddp_hpc.wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001 * world.world_size)
    loss_of = torch.nn.CrossEntropyLoss()

    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model(batch.src, batch.tgt), batch.tgt) * batch.weight
        loss.backward()
        optimizer.step()
        mean = world.sum(loss.detach().clone()) / world.world_size
        world.say(f"epoch {batch.epoch} loss {mean.item():.6f}")
