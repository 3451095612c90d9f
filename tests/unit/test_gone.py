"""Names that left say what to use instead, in each way that a program asks for them."""

from __future__ import annotations

import pytest

import mpiddp
from mpiddp.gone import GONE


def test_a_name_that_left_says_what_to_use_instead():
    use = GONE["_coalescing_manager"]
    assert not hasattr(mpiddp, "_coalescing_manager")
    with pytest.raises(AttributeError, match=f"_coalescing_manager': {use}"):
        mpiddp._coalescing_manager  # noqa: B018
    for module in ("mpiddp", "mpiddp.distributed"):
        with pytest.raises(ImportError, match=f"module '{module}' has no attribute .*: {use}"):
            exec(f"from {module} import _coalescing_manager")
    with pytest.raises(AttributeError, match=r"'mpiddp.optim' has no attribute 'RMSprop': it is gone: use Adam"):
        mpiddp.optim.RMSprop  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
        mpiddp.other  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'other'"):
        exec("from mpiddp import other")
