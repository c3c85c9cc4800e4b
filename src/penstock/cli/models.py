"""`penstock generate` and `evaluate`: uses of a trained model on one process."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from functools import partial

from penstock.cli.out import add, progress_line, user_path, whole
from penstock.cli.run import BAD_USAGE, FAILED, say
from penstock.config import UNSET, ConfigError, open_regular
from penstock.extras import install, needs

LEAST_TEMPERATURE = 1e-4
"""Logits are divided by it: far below, they overflow, and already here one token has all the probability."""

CHECKPOINT = "an output folder or a checkpoint of penstock train, or a Hugging Face model folder"
TOKENS = whole(1, 1 << 62, "is no number of tokens; use 1 or more")
SEED = whole(0, (1 << 63) - 1, "is no seed; use 0 or more, below 2 ** 63")
MISSING = f"this command {needs('transformers')}. {install('transformers')}"


def add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to `penstock`."""
    _add_generate(commands)
    _add_evaluate(commands)


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue a text with a trained model",
        description="Prints a prompt and what a trained model makes of it, on one process.",
        epilog="Example: penstock generate runs/tiny --prompt 'def main' --max-new-tokens 40",
    )
    add(generate, "checkpoint CHECKPOINT", CHECKPOINT, type=user_path)
    add(generate, "--prompt TEXT", "the beginning of the text", type=_unicode, required=True)
    add(generate, "--max-new-tokens N", "tokens to add at most (default: 64)", type=TOKENS, default=64)
    add(
        generate,
        "--temperature T",
        "0 takes the likeliest token (default: 0; 1 where --top-k or --top-p is given)",
        type=_temperature,
    )
    add(generate, "--top-k K", "sample from the K likeliest tokens (default: all)", type=TOKENS)
    add(
        generate,
        "--top-p P",
        "sample from the smallest set of tokens whose probabilities sum to P (default: 1)",
        type=_share,
    )
    _add_tokenizer(generate)
    add(generate, "--seed N", "seed for sampling (default: 0)", type=SEED, default=0)
    add(generate, "--json", "print one JSON object")
    generate.set_defaults(run=lambda options, given: _explained(lambda: _generate(options)))


def _add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="loss and perplexity of a trained model on a text",
        description="Prints how well a trained model predicts a text: mean loss in nats and perplexity, on "
        "one process.",
        epilog="Example: penstock evaluate runs/tiny README.md",
    )
    add(evaluate, "checkpoint CHECKPOINT", CHECKPOINT, type=user_path)
    add(evaluate, "file FILE", "a text in UTF-8", type=user_path)
    add(evaluate, "--length N", "tokens per window (default: the model's context length)", type=TOKENS)
    _add_tokenizer(evaluate)
    add(evaluate, "--json", "print one JSON object")
    evaluate.set_defaults(run=lambda options, given: _explained(lambda: _evaluate(options)))


def _add_tokenizer(command: argparse.ArgumentParser) -> None:
    usual = "a tokenizer.json, or bytes (default: what the model was trained with)"
    add(command, "--tokenizer FILE", usual, type=user_path)


def _generate(options: argparse.Namespace) -> int:
    from penstock.adapt.asking import Sampling, generate, open_model

    temperature, top_k, top_p = options.temperature, options.top_k or 0, options.top_p or 1.0
    if temperature is None:
        temperature = 0.0 if options.top_k is None and options.top_p is None else 1.0
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=options.seed)
    opened = open_model(options.checkpoint, options.tokenizer)
    if options.json:
        text = generate(opened, options.prompt, options.max_new_tokens, sampling)
        print(json.dumps({"prompt": options.prompt, "text": text}))
        return 0
    show = partial(print, end="", flush=True)
    generate(opened, options.prompt, options.max_new_tokens, sampling, show)
    print()
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from penstock.adapt.asking import judge, open_model

    opened = open_model(options.checkpoint, options.tokenizer)
    with open_regular(options.file, str(options.file), "Give a file of text.") as file:
        data = file.read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        why = f"is not UTF-8 text (line {line})"
        raise ConfigError(str(options.file), UNSET, why, "Save it as UTF-8.") from error
    with progress_line(shown=sys.stderr.isatty()):
        score = judge(opened, text, options.length, str(options.file))
    if options.json:
        print(json.dumps({"loss": score.loss, "perplexity": score.perplexity, "tokens": score.tokens}))
    else:
        figures = f"loss {score.loss:.4f} nats per token, perplexity {score.perplexity:.3f}"
        print(f"{figures}, {score.tokens:,} tokens")
    return 0


def _explained(command: Callable[[], int]) -> int:
    """Return the exit code of a command; report in one line what a user can mend."""
    from penstock.checkpoint.storage import CheckpointError

    try:
        return command()
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        say(MISSING)
        return BAD_USAGE
    except BrokenPipeError:
        raise  # the reader of the text has gone, as `head` does
    except (ValueError, OSError, CheckpointError) as error:
        say(str(error))
        return FAILED if isinstance(error, CheckpointError) else BAD_USAGE


def _number(text: str) -> float:
    """Return the number that a text spells; nan, which no option takes, for another text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _temperature(text: str) -> float:
    value = _number(text)
    if value != 0 and not LEAST_TEMPERATURE <= value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be 0, for the likeliest token, or at least {LEAST_TEMPERATURE}"
        )
    return value


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8; write it in UTF-8") from error
    return text


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be above 0 and at most 1")
    return value
