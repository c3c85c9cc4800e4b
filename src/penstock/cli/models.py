"""`penstock convert`, `generate` and `evaluate`: what can be done with a trained model on one process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.cli.codes import BAD_USAGE, FAILED
from penstock.extras import install, needs

CHECKPOINT = "an output folder or a checkpoint of penstock train, or a folder of transformers"
MISSING = f"this command {needs('transformers')}. {install('transformers')}"


def add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to `penstock`."""
    _add_generate(commands)
    _add_evaluate(commands)
    _add_convert(commands)


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    generate = commands.add_parser(
        "generate",
        help="let a trained model go on with a text",
        description="Prints a prompt and what a trained model makes of it, on one process.",
        epilog="Example: penstock generate runs/tiny --prompt 'def main' --max-new-tokens 40",
    )
    generate.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=CHECKPOINT)
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="the beginning of the text")
    generate.add_argument(
        "--max-new-tokens", type=_positive, default=64, metavar="N", help="tokens to add at most (64)"
    )
    generate.add_argument(
        "--temperature",
        type=_not_negative,
        metavar="T",
        help="0 takes the likeliest token (0; 1 where --top-k or --top-p is given)",
    )
    generate.add_argument(
        "--top-k", type=_positive, metavar="K", help="draw from the K likeliest tokens (all)"
    )
    generate.add_argument(
        "--top-p", type=_share, metavar="P", help="draw from the likeliest of this share (1)"
    )
    _add_tokenizer(generate)
    generate.add_argument("--seed", type=_seed, default=0, metavar="N", help="of what is drawn (0)")
    generate.add_argument("--json", action="store_true", help="print one JSON object")
    generate.set_defaults(run=lambda options, given: _explained(lambda: _generate(options)))


def _add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="perplexity of a trained model on a file",
        description="Prints how well a trained model predicts a text: mean loss in nats and perplexity, on "
        "one process.",
        epilog="Example: penstock evaluate runs/tiny README.md",
    )
    evaluate.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=CHECKPOINT)
    evaluate.add_argument("file", type=Path, metavar="FILE", help="a text in UTF-8")
    evaluate.add_argument(
        "--length", type=_positive, metavar="N", help="tokens of a window (as many as the model has places)"
    )
    _add_tokenizer(evaluate)
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    evaluate.set_defaults(run=lambda options, given: _explained(lambda: _evaluate(options)))


def _add_tokenizer(command: argparse.ArgumentParser) -> None:
    usual = "that of a folder of transformers, or bytes"
    command.add_argument("--tokenizer", type=Path, metavar="FILE", help=f"a tokenizer.json ({usual})")


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = commands.add_parser(
        "convert",
        help="a checkpoint as a folder of transformers, and back",
        description="Writes the model of a checkpoint as configuration and safetensors, which "
        "AutoModelForCausalLM reads after `import penstock.adapt.own`; or such a folder as a checkpoint "
        "without moments, from which penstock train continues; or a checkpoint of penstock.save_checkpoint "
        "without the optimizer's state.",
        epilog="Example: penstock convert runs/tiny exported",
    )
    convert.add_argument("source", type=Path, metavar="FROM", help=CHECKPOINT)
    convert.add_argument("target", type=Path, metavar="TO", help="a folder that is not there yet")
    convert.set_defaults(run=lambda options, given: _explained(lambda: _convert(options)))


def _generate(options: argparse.Namespace) -> int:
    from penstock.adapt.asking import Sampling, generate, open_model

    temperature, top_k, top_p = options.temperature, options.top_k or 0, options.top_p or 1.0
    if temperature is None:
        temperature = 0.0 if options.top_k is None and options.top_p is None else 1.0
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=options.seed)
    opened = open_model(options.checkpoint, options.tokenizer)
    text = generate(opened, options.prompt, options.max_new_tokens, sampling)
    found = {"prompt": options.prompt, "text": text}
    print(json.dumps(found) if options.json else options.prompt + text)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from penstock.adapt.asking import judge, open_model

    opened = open_model(options.checkpoint, options.tokenizer)
    found = judge(opened, options.file.read_bytes().decode(), options.length)
    if options.json:
        print(json.dumps({"loss": found.loss, "perplexity": found.perplexity, "tokens": found.tokens}))
    else:
        words = f"loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.3f}"
        print(f"{words}, {found.tokens:,} tokens")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from penstock.adapt.asking import find_checkpoint, read_whole
    from penstock.adapt.checkpoint import export, is_trained, refuse_adapters
    from penstock.adapt.own import PenstockForCausalLM, from_checkpoint, to_checkpoint

    source, target = options.source, options.target
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty: name a folder that is not there yet")
    checkpoint = find_checkpoint(source)
    if checkpoint is not None:
        from_checkpoint(checkpoint).save_pretrained(target)
        print(f"{checkpoint} as a model of transformers: {target}")
        return 0
    refuse_adapters(source)
    model = read_whole(source)
    if is_trained(source):
        export(source, target)
        print(f"{source} as a model of transformers: {target}")
        return 0
    if not isinstance(model, PenstockForCausalLM):
        raise ValueError(
            f"{source} is a {type(model).__name__}, which penstock train does not know: fine-tune it with "
            "penstock.load_pretrained, whose checkpoints transformers reads as they are"
        )
    print(f"{source} as a checkpoint: {to_checkpoint(model, target)}")
    return 0


def _explained(command: Callable[[], int]) -> int:
    """What the command returns; what a user can mend is told in one line."""
    from penstock.train.checkpoint import CheckpointError

    try:
        return command()
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        print(f"penstock: {MISSING}", file=sys.stderr)
        return BAD_USAGE
    except (ValueError, OSError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return BAD_USAGE
    except CheckpointError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return FAILED


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; use 1 or more")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; use 0 or more, below 2 ** 63")
    return int(text)


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no temperature; use 0 or more")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; use more than 0, and 1 at most")
    return value
