"""`optune validate RECIPE --config CONFIG [key=value …]`: all that `run` checks before the first step."""

from __future__ import annotations

from tune_cli.run import make_parser, read_request


def run(words: list[str]) -> int:
    """Checks and prints the resolved config to stdout; secrets are hidden."""
    parser = make_parser(
        "validate",
        "RECIPE --config CONFIG [key=value …]",
        "Checks everything that `optune run` checks before the first step, and prints the resolved config.",
    )
    options, others = parser.split(words)
    request = read_request(parser, options, others)
    cfg = request.load()
    request.recipe.main(cfg, validate_only=True)

    from optune.config import to_yaml

    print(to_yaml(cfg, hide_secrets=True), end="")
    return 0
