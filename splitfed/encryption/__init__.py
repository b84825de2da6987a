"""CKKS encryption by TenSEAL: parameters, keys by role, ciphertexts as messages, layers computed on ciphertexts."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.encryption.arithmetic import (
        add as add,
        add_plain as add_plain,
        multiply as multiply,
        square as square,
    )
    from splitfed.encryption.ciphertexts import (
        EncryptedTensor as EncryptedTensor,
        decrypt as decrypt,
        encrypt as encrypt,
        load_ciphertexts as load_ciphertexts,
        message_bytes as message_bytes,
    )
    from splitfed.encryption.key_search import (
        find_secret_key_files as find_secret_key_files,
        find_secret_keys as find_secret_keys,
    )
    from splitfed.encryption.keys import (
        KeyHolder as KeyHolder,
        PublicContext as PublicContext,
        load_keys as load_keys,
        load_public_context as load_public_context,
        make_keys as make_keys,
    )
    from splitfed.encryption.linear import (
        convolution as convolution,
        linear as linear,
        linear_encrypted as linear_encrypted,
    )
    from splitfed.encryption.parameter_fit import choose_parameters as choose_parameters
    from splitfed.encryption.parameters import PRESETS as PRESETS, CkksParameters as CkksParameters, preset as preset
    from splitfed.encryption.secure_sum import EncryptedSum as EncryptedSum
    from splitfed.encryption.stages import Square as Square
    from splitfed.encryption.weight_shares import merge_weight_shares as merge_weight_shares

make_lazy(__name__)
