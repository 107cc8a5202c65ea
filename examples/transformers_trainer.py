"""Trains a tiny language model on Python's own manual, on two CPU processes that send compressed
gradients.

    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py

The lines to copy are those with `CommHookTrainer` and its `hook`; the rest is an ordinary script
for the Trainer. Nothing is downloaded: the text comes with Python, tokens are bytes, and the
weights are random. Run again with the same `--folder`, also after a crash, the script resumes from
the last checkpoint, including the learned state of the hook.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from accelerate_commhooks.transformers import CommHookTrainer

CONTEXT = 64  # context length in bytes


def manual(context: int = CONTEXT) -> tuple[TensorDataset, TensorDataset]:
    """The pages of `help("topics")`, about 460,000 bytes in pieces of `context`; every tenth piece
    is test data.
    """
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    pieces = pieces[: len(pieces) // context * context].view(-1, context)
    test = torch.arange(len(pieces)) % 10 == 0
    return TensorDataset(pieces[~test]), TensorDataset(pieces[test])


def batch(pieces: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch. The model shifts the labels itself: it predicts each byte from those before
    it.
    """
    stacked = torch.stack([piece for (piece,) in pieces])
    return {"input_ids": stacked, "labels": stacked}


def make_model(width: int = 128, layers: int = 2) -> LlamaForCausalLM:
    """400,000 parameters with the default sizes; 256 tokens, one for each value of a byte."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint: the Trainer writes trainer_state.json last."""
    finished = [state.parent for state in folder.glob("checkpoint-*/trainer_state.json")]
    return max(
        finished,
        key=lambda checkpoint: int(checkpoint.name.removeprefix("checkpoint-")),
        default=None,
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--hook", default="powerSGD", help="name of the hook; 'commhooks hooks' lists them"
    )
    parser.add_argument("--hook-options", type=json.loads, help="options of the hook, as JSON")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=Path("trainer"), help="for checkpoints and result.json"
    )
    return parser


def main() -> None:
    args = arguments().parse_args()
    set_seed(args.seed)
    train, test = manual()
    trainer = CommHookTrainer(
        make_model(),
        TrainingArguments(
            args.folder,
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            logging_steps=10,
            save_steps=args.save_steps,
            save_total_limit=2,
            report_to="none",
            seed=args.seed,
            # Small buckets, so that this small network has several of them like a large one.
            ddp_bucket_cap_mb=1,
            ddp_find_unused_parameters=False,
            dataloader_pin_memory=False,
        ),
        data_collator=batch,
        train_dataset=train,
        eval_dataset=test,
        hook=args.hook,
        hook_options=args.hook_options,
    )
    checkpoint = last_checkpoint(args.folder)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    stats = trainer.comm_hook.stats() if trainer.comm_hook is not None else None
    loss = trainer.evaluate()["eval_loss"]

    if trainer.is_world_process_zero():
        trainer.save_model(str(args.folder / "final"))
        result = {"test_loss": loss, "global_step": trainer.state.global_step, "stats": stats}
        (args.folder / "result.json").write_text(json.dumps(result, indent=2))
        print(
            f"Test loss {loss:.3f} (a model that knows nothing: 5.545), step"
            f" {trainer.state.global_step}"
        )
        if stats is not None and stats["bytes_sent"]:
            print(
                f"Since the start or the resume {stats['compression_rate']:.1f} times fewer bytes"
                " were sent"
            )
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
    # Accelerate, DDP and gloo sometimes abort at interpreter shutdown, with or without a hook: exit
    # here.
    sys.stdout.flush()
    os._exit(0)
