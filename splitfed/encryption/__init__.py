"""CKKS encryption by TenSEAL: parameters, keys by role, ciphertexts as messages, layers computed on ciphertexts."""

from splitfed.encryption.arithmetic import add, add_plain, multiply, square
from splitfed.encryption.ciphertexts import EncryptedTensor, decrypt, encrypt, load_ciphertexts, message_bytes
from splitfed.encryption.convolution import convolution
from splitfed.encryption.key_search import find_secret_key_files, find_secret_keys
from splitfed.encryption.keys import KeyHolder, PublicContext, load_keys, load_public_context, make_keys
from splitfed.encryption.linear import linear, linear_encrypted
from splitfed.encryption.parameters import PRESETS, CkksParameters, preset
from splitfed.encryption.planner import choose_parameters
from splitfed.encryption.stages import Square
from splitfed.encryption.weight_shares import merge_weight_shares

__all__ = [
    "PRESETS",
    "CkksParameters",
    "EncryptedTensor",
    "KeyHolder",
    "PublicContext",
    "Square",
    "add",
    "add_plain",
    "choose_parameters",
    "convolution",
    "decrypt",
    "encrypt",
    "find_secret_key_files",
    "find_secret_keys",
    "linear",
    "linear_encrypted",
    "load_ciphertexts",
    "load_keys",
    "load_public_context",
    "make_keys",
    "merge_weight_shares",
    "message_bytes",
    "multiply",
    "preset",
    "square",
]
