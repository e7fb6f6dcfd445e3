"""The public name for scripts: `from distaccum.transformers import AccumulatingTrainer`."""

try:
    from .trainers.transformers import AccumulatingTrainer
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "accelerate"):
        raise
    raise ImportError(f"no {error.name} is installed; pip install transformers accelerate") from error

__all__ = ["AccumulatingTrainer"]
