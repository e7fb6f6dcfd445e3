"""The cases of launch/bench/law.py, and each library's documented way through them."""

from .accelerate import ACCELERATE, RECIPE
from .byhand import HAND, JOIN
from .deepspeed import library as deepspeed
from .distaccum import DISTACCUM
from .fabric import FABRIC
from .lightning import EXACT, LIGHTNING
from .task import Library
from .transformers import TRANSFORMERS

LIBRARIES: dict[str, Library] = {
    "hand": HAND,
    "join": JOIN,
    "accelerate": ACCELERATE,
    "accelerate_recipe": RECIPE,
    "fabric": FABRIC,
    "lightning": LIGHTNING,
    "lightning_exact": EXACT,
    "transformers": TRANSFORMERS,
    "deepspeed0": deepspeed(0),
    "deepspeed2": deepspeed(2),
    "distaccum": DISTACCUM,
}
