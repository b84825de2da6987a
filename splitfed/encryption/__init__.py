"""CKKS encryption by TenSEAL: parameters, keys by role, ciphertexts as messages, layers computed on ciphertexts."""

from splitfed.encryption.key_search import find_secret_key_files, find_secret_keys
from splitfed.encryption.keys import KeyHolder, PublicContext, load_keys, load_public_context, make_keys
from splitfed.encryption.parameters import PRESETS, CkksParameters, choose_parameters, preset

__all__ = [
    "PRESETS",
    "CkksParameters",
    "KeyHolder",
    "PublicContext",
    "choose_parameters",
    "find_secret_key_files",
    "find_secret_keys",
    "load_keys",
    "load_public_context",
    "make_keys",
    "preset",
]
