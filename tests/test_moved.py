"""Names that are elsewhere: the error says where, and the table is right."""

import importlib
import re

import pytest

import mpiddp
from mpiddp import moved
from mpiddp.autograd import Tensor


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("mpiddp.nn.parallel", "module 'mpiddp.nn' has no attribute 'parallel': use mpiddp.DistributedDataParallel or"),
        ("import mpiddp.utils.data", "No module named 'mpiddp.utils': torch.utils.data's names are in mpiddp.data"),
        ("from mpiddp.distributed import save", "use mpiddp.save"),
        ("mpiddp.autograd.Tensor([1.0]).numel()", "'Tensor' object has no attribute 'numel': it is gone: use x.size"),
    ],
)
def test_natural_names_are_told(statement, text):
    with pytest.raises((AttributeError, ImportError)) as caught:
        exec(statement, {"mpiddp": mpiddp})
    assert text in str(caught.value)
    assert isinstance(caught.value, ImportError if "import" in statement else AttributeError)


def test_other_names_are_as_in_any_module():
    assert not hasattr(mpiddp.nn, "parallel") and not hasattr(mpiddp, "__wrapped__")
    with pytest.raises(AttributeError, match=r"module 'mpiddp\.nn' has no attribute 'Linaer'$") as caught:
        mpiddp.nn.Linaer  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("Linaer", mpiddp.nn)  # Python adds: Did you mean: 'Linear'?
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from mpiddp.nn import nothing  # noqa: F401


def test_rows_are_of_names_that_are_gone_and_lead_to_ones_that_are_there():
    for row, cure in moved._INSTEAD.items():
        package, _, name = f"mpiddp.{row}".rpartition(".")
        owner = Tensor if package == "mpiddp.Tensor" else importlib.import_module(package)
        assert name not in dir(owner), row
        for words in re.findall(r"(?<!torch\.)\bmpiddp((?:\.\w+)+)", cure):
            found = mpiddp
            for word in words.split(".")[1:] if words != ".torch" else ():  # which needs torch
                found = getattr(found, word)
