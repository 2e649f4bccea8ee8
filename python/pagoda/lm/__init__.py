"""Language models that keep their K and V in a `pagoda.Cache`: the Llama family, from Hugging Face checkpoints."""

from pagoda.lm.contiguous import ContiguousCache
from pagoda.lm.generate import Read, Written, generate
from pagoda.lm.model import LanguageModel
from pagoda.lm.sampling import Sampler

__all__ = ["ContiguousCache", "LanguageModel", "Read", "Sampler", "Written", "generate"]
