"""A small randomly initialised GPT-2 with the Trainer of Hugging Face Transformers.

    torchrun --nproc-per-node 2 with_trainer.py

Model and tokens are made here; nothing is downloaded.
"""

import argparse
import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    """Random tokens in which each one follows from the one before."""

    def __init__(self, samples, length, vocabulary):
        generator = torch.Generator().manual_seed(1)
        first = torch.randint(vocabulary, (samples, 1), generator=generator)
        self.tokens = (first + 7 * torch.arange(length)) % vocabulary

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="samples of all ranks in one step")
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    set_seed(0)
    config = GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4,
                        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=arguments.batch // ranks,
                max_steps=arguments.steps,
                learning_rate=1e-3,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_steps=10,
                disable_tqdm=True,
                average_tokens_across_devices=False,
            ),
            train_dataset=Tokens(1024, 64, config.vocab_size),
        )
        trainer.train()


if __name__ == "__main__":
    main()
