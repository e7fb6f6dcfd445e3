"""What the scripts of transformers import: `from distaccum.transformers import AccumulatingTrainer`."""

from .integrations.transformers import AccumulatingTrainer

__all__ = ["AccumulatingTrainer"]
