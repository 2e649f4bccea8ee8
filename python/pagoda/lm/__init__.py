"""A language model that keeps its K and V in a `pagoda.Cache`: Llama and its kin, from Hugging Face checkpoints."""

from pagoda.lm.contiguous import ContiguousCache
from pagoda.lm.generate import Read, Written, generate
from pagoda.lm.model import LanguageModel
from pagoda.lm.sampling import Sampler

__all__ = ["ContiguousCache", "LanguageModel", "Read", "Sampler", "Written", "generate"]
