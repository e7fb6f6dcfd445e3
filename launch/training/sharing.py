"""Ranks that share samples: tensor-parallel (tp) and context-parallel (cp) ranks, and stages of a pipeline (pp)."""

from __future__ import annotations

from .config import Config, stop
from .gpt import num_heads

SHARING = {"tp": "tensor", "cp": "context", "pp": "stage"}  # options, and the dimensions of the mesh
SHARERS = {"tp": "tensor-parallel ranks", "cp": "context-parallel ranks", "pp": "stages"}


def sharing(config: Config) -> tuple[str, int]:
    """The option by which ranks share samples, and how many do; "" and 1 where each rank has its own."""
    return next(((name, getattr(config, name)) for name in SHARING if getattr(config, name) > 1), ("", 1))


def check_sharing(config: Config, ranks: int) -> None:
    """Stops at a combination that the program does not support."""
    name, number = sharing(config)
    if not name:
        return
    given = f"{name} = {number}"
    several = [f"{one} = {getattr(config, one)}" for one in SHARING if getattr(config, one) > 1]
    if len(several) > 1:
        stop(f"{' and '.join(several)}, expected one of tp, cp and pp above 1; FSDP2 takes the ranks that are left")
    if config.model != "gpt":
        stop(f"{given} with model = {config.model!r}, expected task = 'language' and 'gpt', whose layers can be cut")
    if config.engine not in ("auto", "fsdp2"):
        stop(f"{given} with engine = {config.engine!r}, expected 'fsdp2', which works over the data ranks alone")
    for other, value in (("replicas", config.replicas > 1), ("measure_noise", config.measure_noise)):
        if value:
            stop(f"{given} with {other}, expected one of them; leave the other out")
    if ranks % number:
        stop(f"{given} on {ranks} rank{'s' * (ranks > 1)}, expected a number that divides them")
    heads = num_heads(config.width)
    if name == "tp" and heads % number:
        stop(f"{given} and width = {config.width}, which makes {heads} heads, expected a number that divides them")
    if name == "cp" and config.context % number:
        stop(f"{given} and context = {config.context}, expected a number that divides it")
    if name == "pp":
        _check_pipeline(config)


def _check_pipeline(config: Config) -> None:
    micro, given = config.micro_batch_size, f"pp = {config.pp}"
    if config.layers < config.pp:
        stop(f"{given} and layers = {config.layers}, expected a layer for each stage")
    if micro % config.pp:
        stop(f"{given} and micro_batch_size = {micro}, expected a multiple of {config.pp}: a chunk for each stage")
    if config.sync != "last":
        stop(f"{given} with sync = {config.sync!r}, expected 'last': a pipeline reduces once per update")
