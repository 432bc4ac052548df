"""Arrays that messages carry."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = npt.NDArray[np.int32]
Float32s: TypeAlias = npt.NDArray[np.float32]


def token_ids(values: "list[int] | tuple[int, ...] | TokenIds") -> TokenIds:
    """Return `values` as the int32 array that messages carry."""
    return np.asarray(values, dtype=np.int32)


NO_TOKENS: TokenIds = token_ids([])
